"""What came out of a run, as everything that uses it afterwards finds it: its end, or one of its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.export.adapter_check import check_adapter
from tunebook.launching.world import count_gpus, world_of
from tunebook.plan.plan import Plan
from tunebook.plan.planning import plan_without_data
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.schema import Recipe
from tunebook.runs.checkpoints import Checkpoint, NotWhole, check_whole, list_checkpoints
from tunebook.runs.folder import read_summary
from tunebook.runs.past import explain_unfinished, is_going_on
from tunebook.system.places import is_local, local_path


@dataclass(frozen=True)
class Finished:
    """A run and which of its weights are meant: those of its end, or of a checkpoint, whatever became of the run.

    `folder` is the run folder, `recipe` the recipe as it was run, `summary` what run_summary.json says of the whole
    run: its figures are those of the end, also where a checkpoint is meant. `base` is the place of its base, where
    that was named apart from the recipe, which then has it, too.
    """

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]
    planned: Plan | None = None
    checkpoint: Checkpoint | None = None
    base: str | None = None

    @cached_property
    def plan(self) -> Plan:
        """Its plan for one process here. Raises Refused where the model cannot be computed as it was trained."""
        world = world_of(1, "cuda" if count_gpus() else "cpu")
        return self.planned or plan_without_data(self.recipe, world, str(self.folder))

    @property
    def adapter(self) -> Path:
        """The folder of what came out at the end: the adapter, or the whole model after a full fine-tune.

        A checkpoint has no such folder; `tunebook.export.exported.exported_folder` makes one.
        """
        assert self.checkpoint is None, "a checkpoint is exported first"
        return self.folder / "adapter"

    @cached_property
    def whole_adapter(self) -> Path:
        """The same folder, after every tensor in it was read. Raises Refused where it is not what was trained."""
        check_adapter(self.adapter, self.recipe, self.summary.get("adapter_sha256"))
        return self.adapter

    @property
    def source(self) -> Path:
        """The folder that holds the weights: the adapter folder, or that of the checkpoint."""
        return self.adapter if self.checkpoint is None else self.checkpoint.folder


def open_finished(run_dir: str, base: str | None = None) -> Finished:
    """Return the finished run in a folder, or a checkpoint of any run, as in `runs/x/checkpoints/checkpoint-4`.

    Neither the data nor the base has to be there any more; `base` says where the base lies now, and whoever loads it
    asks `past_base.check_base` first. Of a base of the Hub the recipe names the commit that was trained on. Raises
    Refused where there is no run, where it did not come to its end and no checkpoint of it is named, and where the
    checkpoint is not as it was saved.
    """
    place = Path(run_dir).expanduser()
    place = place.resolve() if place.is_symlink() else place  # such as `latest`, made by hand
    checkpoint = None
    if not (place / "run_summary.json").is_file() and _is_checkpoint(place):
        checkpoint, place = _open_checkpoint(place), _run_of(place)
    summary = read_summary(place)
    if summary is None:
        raise Refused(Problem("no run_summary.json there, so it is no run", _run_fix(place), run_dir))
    if checkpoint is None and summary.get("status") != "completed":
        raise Refused(Problem(explain_unfinished(place, summary), _checkpoint_fix(place, summary), run_dir))
    recipes = sorted(place.glob("*.yaml"))
    if len(recipes) != 1:
        raise Refused(Problem(f"{len(recipes)} recipes are there, and a run has one", where=str(place)))
    recipe = load_recipe(str(recipes[0]), was_run=True)
    recipe = _with_base(recipe, base, summary.get("model_revision"))
    finished = Finished(place, recipe, summary, checkpoint=checkpoint, base=base)
    if not any(finished.source.glob("*.safetensors")):
        raise Refused(Problem("holds no weights", _checkpoint_fix(place, summary), str(finished.source)))
    return finished


def explain_taken(place: Path, finished: Finished) -> str:
    """Return why nothing may be written to a resolved place: it lies in a run folder, or in that of the base."""
    for above in (place, *place.parents):
        if above == finished.folder.resolve() or read_summary(above) is not None:
            return f"lies in the run folder {above}, which is left as it is"
    base = finished.recipe.model.name_or_path
    if is_local(base) and local_path(base).resolve() in (place, *place.parents):
        return f"lies in the folder of the base, {base}, which is left as it is"
    return ""


def _with_base(recipe: Recipe, base: str | None, commit: str | None) -> Recipe:
    """Return the recipe with the place of the base, or the commit of the Hub's: a branch may have moved since."""
    if base is not None:
        changes = {"name_or_path": base}
    elif commit is not None and recipe.model.base_id is None and not is_local(recipe.model.name_or_path):
        changes = {"revision": commit}
    else:
        return recipe
    return replace(recipe, model=recipe.model.model_copy(update=changes))


def _is_checkpoint(place: Path) -> bool:
    return place.absolute() in list_checkpoints(place.absolute().parent)


def _open_checkpoint(place: Path) -> Checkpoint:
    try:
        return check_whole(place)
    except NotWhole as reason:
        fix = "It was changed after it was saved, or only in part; name another checkpoint"
        raise Refused(Problem(f"is no whole checkpoint: {reason}", fix, str(place))) from reason


def _run_of(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint, by the path that was given where it holds the run folder's name."""
    named = checkpoint.parent.parent
    return named if named.name else checkpoint.absolute().parent.parent


def _run_fix(place: Path) -> str:
    """Return what to name instead of a folder that is no run: the run that it belongs to, where there is one."""
    above = [folder for folder in place.absolute().parents if read_summary(folder) is not None]
    example = f"{place}, which is in {above[0]}: name that" if above else "Name a run folder, such as runs/tiny_qlora"
    return f"This is {example}" if above else example


def _checkpoint_fix(place: Path, summary: Mapping[str, Any]) -> str:
    """Return what can be done with a run that left no adapter."""
    goes_on = summary.get("status") == "running" and is_going_on(place)
    again = "Wait for its end" if goes_on else "Run its command again to bring it to its end"
    checkpoints = list_checkpoints(place / "checkpoints")
    return f"{again}, or name a checkpoint, such as {checkpoints[-1]}" if checkpoints else again
