"""What padding costs on rows as they come, by tunebook's own sampler, from their lengths alone; nothing is trained.

python benchmarks/padding_share.py        (part of make bench)

The share of positions that hold no token, over the first epoch, at a global batch of 64 on one process: with the rows
of a global batch laid out by length, packed, and in micro-batches of random rows. Another tokenizer has other figures.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_speed import SHARED, check_files

GLOBAL_BATCH, MICRO_BATCHES = 64, (2, 4, 8, 16)
MOST_AT_4, MOST_PACKED = 0.05, 0.01
RECIPE = """
model: {{name_or_path: not/needed, dtype: float32}}
lora: {{r: 8}}
data: {{path: "{rows}", format: alpaca, max_length: 1024, validation: 0, packing: {packed}}}
training: {{global_batch_size: {global_batch}, per_device_train_batch_size: {micro_batch}, num_train_epochs: 1}}
"""


def measure(rows: Path, tokenizer: Path) -> dict[int, dict[str, float]]:
    """Return the shares of padding by micro-batch: `laid out`, `packed` and `random`."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import load_tokenizer
    from tunebook.launching.world import read_world
    from tunebook.plan.padding import measure_padding
    from tunebook.plan.plan import build_plan, with_split
    from tunebook.recipe.reading import load_recipe

    loaded, found = load_tokenizer(str(tokenizer), None), {}
    with TemporaryDirectory() as folder:
        os.environ["TUNEBOOK_CACHE"] = folder
        for micro_batch in MICRO_BATCHES:
            shares: dict[bool, Any] = {}
            for packed in (False, True):
                path = Path(folder) / "padding.yaml"
                given = {"rows": rows.resolve(), "packed": str(packed).lower(), "micro_batch": micro_batch}
                path.write_text(RECIPE.format(**given, global_batch=GLOBAL_BATCH), encoding="utf-8")
                recipe = load_recipe(str(path), ())
                data = prepare_data(recipe, loaded)
                plan = with_split(build_plan(recipe, read_world(), run_dir=folder), data.num_train_rows, 0, {})
                shares[packed] = measure_padding(recipe, plan, data.train["length"])
            plain = shares[False]
            found[micro_batch] = {
                "laid out": round(plain.share, 4),
                "packed": round(shares[True].share, 4),
                "random": round(plain.random_share, 4),
            }
    return found


def broken_promises(found: dict[int, dict[str, float]]) -> list[str]:
    """Return what is promised of padding and not kept."""
    broken = []
    if found[4]["laid out"] > MOST_AT_4:
        broken.append(f"padding at micro-batch 4 is {found[4]['laid out']:.1%}, promised at most {MOST_AT_4:.0%}")
    broken += [
        f"padding packed at micro-batch {size} is {one['packed']:.1%}, promised at most {MOST_PACKED:.0%}"
        for size, one in found.items()
        if one["packed"] > MOST_PACKED
    ]
    return broken


def main() -> None:
    """Print the shares as JSON; exit code 1 where the promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer-mini")
    given = parser.parse_args()
    check_files(parser, given)
    found = measure(given.rows, given.tokenizer)
    print(json.dumps(found))
    sys.exit("; ".join(broken_promises(found)) or 0)


if __name__ == "__main__":
    main()
