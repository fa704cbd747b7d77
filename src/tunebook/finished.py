"""A run that came to its end, as everything that uses it afterwards finds it in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.plan import Plan
from tunebook.planning import plan_without_data
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.schema import Recipe
from tunebook.run_folder import read_summary
from tunebook.world import count_gpus, world_of


@dataclass(frozen=True)
class Finished:
    """A completed run: its folder, its recipe as it was run, what it measured, and its plan for one process here."""

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]
    plan: Plan

    @property
    def adapter(self) -> Path:
        """The folder of what came out: the adapter, or the whole model after a full fine-tune."""
        return self.folder / "adapter"


def open_finished(run_dir: str) -> Finished:
    """Return the finished run in a folder. Raises Refused where there is none, or one that did not come to its end."""
    folder = Path(run_dir)
    summary = read_summary(folder)
    if summary is None:
        fix = "Name a run folder, such as runs/tiny_qlora"
        raise Refused(Problem("no run_summary.json there", fix, run_dir))
    if summary.get("status") != "completed":
        raise Refused(Problem(f"the run is {summary.get('status')}, and left no adapter", where=run_dir))
    recipes = sorted(folder.glob("*.yaml"))
    if len(recipes) != 1:
        raise Refused(Problem(f"{len(recipes)} recipes are there, and a run has one", where=run_dir))
    recipe = load_recipe(str(recipes[0]))
    world = world_of(1, "cuda" if count_gpus() else "cpu")
    return Finished(folder, recipe, summary, plan_without_data(recipe, world, run_dir))
