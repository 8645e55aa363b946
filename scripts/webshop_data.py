"""WebShop's own files as a catalog of webshop_lite.

    python scripts/webshop_data.py --items items_shuffle_1000.json --attributes items_ins_v2_1000.json \
        --human items_human_ins.json --out catalog.json

Then: gymnasium.make("skyrl/webshop_lite-v0", catalog="catalog.json"). With --human the goals are people's
instructions; without, they are the synthetic ones of --attributes, one for each combination of options.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from skyrl_gym.envs.webshop_lite.catalog import Catalog, load

TEXTS = ("name", "category", "query", "product_category")
KEPT = (*TEXTS, "asin", "full_description", "pricing")


def read(path: Path, kind: type, what: str) -> Any:
    """A JSON file; SystemExit with a sentence unless it holds what is expected."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"{path}: not a JSON file in UTF-8 that can be read ({error}).") from None
    if not isinstance(found, kind) or not found:
        raise SystemExit(f"{path}: expected {what}, got {found!r:.60}.")
    return found


def goals_of(row: dict[str, Any], asked: Any, left_out: Counter[str]) -> list[dict[str, Any]]:
    """People's instructions for a product, but for those without attributes, as in WebShop, or that name no option."""
    kept = []
    for each in asked if isinstance(asked, list) else []:
        goal = {name: each.get(name) for name in ("instruction", "instruction_attributes", "instruction_options")}
        if not goal["instruction_attributes"]:
            left_out["instructions without attributes"] += 1
            continue
        try:
            Catalog([{**row, "instructions": [goal]}], "--human", "en")
        except (ValueError, TypeError, AttributeError):
            left_out["instructions whose options the product does not have"] += 1
            continue
        kept.append(goal)
    return kept


def row_of(item: dict[str, Any]) -> dict[str, Any] | None:
    """A product in webshop_lite's form; None where WebShop, or the form, has no place for it."""
    row = {name: item.get(name) for name in KEPT}
    asin, points = row["asin"], item.get("small_description")
    texts = all(isinstance(row[name], str) and row[name].strip() for name in TEXTS)
    if not (texts and isinstance(asin, str) and asin.isalnum() and len(asin) <= 10 and asin != "nan"):
        return None
    priced = isinstance(row["pricing"], str) and "$" in row["pricing"]
    row["pricing"] = row["pricing"] if priced else None
    points = points if isinstance(points, list) else [points]
    row["small_description"] = [text for text in points if isinstance(text, str) and text.strip()]
    groups = {}
    for name, values in (item.get("customization_options") or {}).items():
        named = [str(each["value"]) for each in values or () if str(each.get("value") or "").strip()]
        if named:
            groups[name] = [{"value": value} for value in named]
    return {**row, "customization_options": groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=Path, required=True, help="items_shuffle.json or items_shuffle_1000.json")
    parser.add_argument("--attributes", type=Path, required=True, help="items_ins_v2.json or items_ins_v2_1000.json")
    parser.add_argument("--human", type=Path, help="items_human_ins.json")
    parser.add_argument("--first", type=int, help="so many products only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    items = read(args.items, list, "a list of products with 'asin' and 'name'")
    mined = read(args.attributes, dict, "an object of products' attributes by asin")
    human = read(args.human, dict, "an object of lists of instructions by asin") if args.human else None
    rows, left_out = dict[str, dict[str, Any]](), Counter[str]()
    for item in items[: args.first]:
        row = row_of(item) if isinstance(item, dict) else None
        if row is None or row["asin"] in rows:
            left_out["products without a text or a proper asin, or of an asin before"] += 1
            continue
        known = mined.get(row["asin"]) or {}
        row["Attributes"] = known.get("attributes") or ["DUMMY_ATTR"]
        if human is None:
            row["instruction_text"] = known.get("instruction")
            row["instruction_attributes"] = known.get("instruction_attributes")
            row |= {} if row["instruction_attributes"] else {"instructions": []}
        else:
            row["instructions"] = goals_of(row, human.get(row["asin"]), left_out)
        rows[row["asin"]] = row
    if not rows:
        raise SystemExit(f"{args.items}: no product has 'asin' and the texts {', '.join(TEXTS)}.")
    args.out.write_text(json.dumps(list(rows.values()), ensure_ascii=False), encoding="utf-8")
    goals = sum(map(len, load(str(args.out), "en").goals.values()))
    for reason, count in left_out.items():
        print(f"left out: {count} {reason}")
    if not goals:
        raise SystemExit(f"{args.out}: {len(rows)} products, but no goal: no asin of --items is in the other files.")
    print(f"{args.out}: {len(rows)} products, {goals} goals")


if __name__ == "__main__":
    main()
