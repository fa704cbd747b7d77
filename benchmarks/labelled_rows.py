"""Writes the labelled rows of a recipe for other programs: `labelled_rows.py RECIPE FOLDER`; prints their labels.

FOLDER/train.parquet has the columns input_ids and labels; FOLDER/saved is the same with an attention mask, as a saved
data set.
"""

import sys
from pathlib import Path

from datasets import Dataset

from tunebook.data.prepare import prepare_data
from tunebook.data.tokenizer import tokenizer_of
from tunebook.recipe.reading import load_recipe


def main(recipe_path: str, folder: Path) -> None:
    """Prepare as finetune.py does, and print how many labels count."""
    recipe = load_recipe(recipe_path, ())
    prepared = prepare_data(recipe, tokenizer_of(recipe))
    rows = prepared.train.select_columns(["input_ids", "labels"]).to_list()
    assert len(rows) == prepared.num_rows, "no row is left out or held out"
    folder.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    masked = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    Dataset.from_list(masked).save_to_disk(folder / "saved")
    print(sum(label != -100 for row in rows for label in row["labels"][1:]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
