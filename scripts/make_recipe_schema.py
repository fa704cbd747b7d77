"""Make `schema/recipe.schema.json`: what editors complete and check recipes with, from the code that reads them.

    python scripts/make_recipe_schema.py [--out schema/recipe.schema.json]

It depends on the installed transformers and peft, whose keys recipes take; a test says when it is not current.
"""

import argparse
import json
from pathlib import Path

from tunebook.recipe.json_schema import build_schema


def main() -> None:
    """Write the schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("schema/recipe.schema.json"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
