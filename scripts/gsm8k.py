"""GSM8K as rows that the trainer takes: train.parquet and validation.parquet.

    python scripts/gsm8k.py --out ~/data/gsm8k                   # from Hugging Face
    python scripts/gsm8k.py --out ~/data/gsm8k --from folder     # train.jsonl and test.jsonl in the official schema

Then: skyrl-trainer train qwen_1gpu environment.env_class=gsm8k data.train_data="['~/data/gsm8k/train.parquet']" ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

ASK = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = {"train": "train", "test": "validation"}
"""The official split -> the name of its file here."""


def row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """In SkyRL's format. Raises SystemExit where the answer has no final line."""
    _, mark, truth = answer.rpartition("####")
    if not mark:
        raise SystemExit(f"{split} row {index + 1}: field 'answer' has no line '#### number'.")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {ASK}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", dest="folder", type=Path, help="a folder with train.jsonl and test.jsonl")
    args = parser.parse_args()
    out = args.out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    for split, name in SPLITS.items():
        if args.folder:
            rows: Any = Dataset.from_json(str(args.folder / f"{split}.jsonl"))
        else:
            rows = load_dataset("openai/gsm8k", "main", split=split)
        made = [row(each["question"], each["answer"], split, index) for index, each in enumerate(rows)]
        Dataset.from_list(made).to_parquet(out / f"{name}.parquet")
        print(f"{out / name}.parquet: {len(made)} rows")


if __name__ == "__main__":
    main()
