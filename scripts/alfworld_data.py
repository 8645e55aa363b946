"""ALFWorld's games as a file of tasks of alfworld_lite.

    python scripts/alfworld_data.py --games ~/.cache/alfworld/json_2.1.1 --out tasks.json

Then: gymnasium.make("skyrl/alfworld_lite-v0", tasks="tasks.json"). A game is a folder with traj_data.json and, beside
it, initial_state.pddl or game.tw-pddl. Folders train, valid_seen and valid_unseen are train, val and test. What
alfworld_lite has no kind for is left out of a room; games that need it, slices or movable receptacles are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from skyrl_gym.envs.alfworld_lite.given import checked
from skyrl_gym.envs.alfworld_lite.world import kind_of, load

SPLITS = {"train": "train", "valid_seen": "val", "valid_unseen": "test"}
ROOMS = {0: "kitchen", 2: "livingroom", 3: "bedroom", 4: "bathroom"}
"""By the hundreds of a floor plan's number."""
PATTERNS = {
    "place": r"\(receptacleType (\S+) (\w+?)Type\)",
    "thing": r"\(objectType (\S+) (\w+?)Type\)",
    "inside": r"\(inReceptacle (\S+) (\S+)\)",
    "thing at": r"\(objectAtLocation (\S+) (\S+)\)",
    "place at": r"\(receptacleAtLocation (\S+) (\S+)\)",
}


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"{path}: not a JSON file in UTF-8 that can be read ({error}).") from None
    if not isinstance(found, dict):
        raise SystemExit(f"{path}: expected a JSON object, got {found!r:.60}.")
    return found


def problem(folder: Path) -> str:
    """The initial state of a game, in PDDL; the goal's variables have types and places, too."""
    plain, game = folder / "initial_state.pddl", folder / "game.tw-pddl"
    if plain.is_file():
        return plain.read_text(encoding="utf-8").partition("(:goal")[0]
    if not game.is_file():
        raise SystemExit(f"{folder}: neither initial_state.pddl nor game.tw-pddl is beside traj_data.json.")
    text = read(game).get("pddl_problem")
    if not isinstance(text, str):
        raise SystemExit(f"{game}: field 'pddl_problem' must be a string, got {text!r:.60}.")
    return text.partition("(:goal")[0]


def numbered(typed: list[tuple[str, str]], kinds: dict[str, Any]) -> dict[str, str]:
    """Names such as "mug 1" for the PDDL's, in their order, of the kinds that are known."""
    counts, names = Counter[str](), {}
    for name, kind in sorted({*typed}):
        if (kind := kind.lower()) in kinds:
            counts[kind] += 1
            names[name] = f"{kind} {counts[kind]}"
    return names


def task(folder: Path, split: str) -> dict[str, Any]:
    """A game's row. ValueError or SystemExit says what is wrong."""
    about, said = read(folder / "traj_data.json"), problem(folder)
    wanted, plan = about.get("pddl_params"), re.search(r"\d+$", str((about.get("scene") or {}).get("floor_plan")))
    if not isinstance(wanted, dict) or plan is None:
        raise SystemExit(f"{folder / 'traj_data.json'}: fields 'pddl_params' and 'scene.floor_plan' are needed.")
    if wanted.get("mrecep_target") or wanted.get("object_sliced"):
        raise ValueError("a movable receptacle or a slice")
    facts, found = load(), {name: re.findall(pattern, said) for name, pattern in PATTERNS.items()}
    places = numbered(found["place"], facts["receptacles"])
    things, lamps = (numbered(found["thing"], facts[kinds]) for kinds in ("objects", "lamps"))
    at = {spot: places[place] for place, spot in sorted(found["place at"], reverse=True) if place in places}
    contents, beside = dict[str, list[str]](), dict[str, str]()
    for thing, place in sorted({*found["inside"]}):
        if thing in things and place in places:
            contents.setdefault(places[place], []).append(things[thing])
        elif thing in lamps and place in places:
            beside[places[place]] = lamps[thing]
    for thing, spot in sorted({*found["thing at"]}):
        if thing in lamps and lamps[thing] not in beside.values() and spot in at:
            beside[at[spot]] = lamps[thing]
    target = (wanted.get("toggle_target") or wanted.get("parent_target") or "").lower()
    lit = {place: lamp for place, lamp in beside.items() if kind_of(lamp) == target}
    row = {"split": split, "type": about.get("task_type"), "object": str(wanted.get("object_target")).lower()}
    row |= {"target": target, "room": ROOMS.get(int(plan[0]) // 100), "contents": contents}
    row |= {"places": dict(Counter(map(kind_of, places.values()))), "lamps": dict([*lit.items()][:1])}
    return checked(row, str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--games", type=Path, required=True, help="the folder that train, valid_seen and so on are in")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    rows, left_out = list[dict[str, Any]](), Counter[str]()
    for name, split in SPLITS.items():
        for path in sorted((args.games.expanduser() / name).rglob("traj_data.json")):
            try:
                rows.append(task(path.parent, split))
            except ValueError as error:
                left_out[str(error).removeprefix(f"{path.parent}: ")[:80]] += 1
    for reason, count in left_out.most_common(20):
        print(f"left out: {count} ({reason})")
    if not rows:
        raise SystemExit(f"{args.games}: no game that can be played; expected {', '.join(SPLITS)} with traj_data.json.")
    args.out.write_text(json.dumps(rows), encoding="utf-8")
    print(f"{args.out}: {len(rows)} tasks, {dict(Counter(row['split'] for row in rows))}")


if __name__ == "__main__":
    main()
