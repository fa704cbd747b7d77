"""TensorBoard and trackio, for `training.report_to`: the lines of metrics.jsonl, shown elsewhere, by rank 0 alone.

Each is filled anew from the lines that a run goes on with, so that it holds what metrics.jsonl does after any end.
transformers' own callbacks would repeat steps after a resume, and trackio's one publishes where the environment says.
"""

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tunebook.recipe.rules import OWN_TRACKERS
from tunebook.recipe.schema import Recipe
from tunebook.recipe.upstream import training_keys
from tunebook.system.quiet import quiet_libraries
from tunebook.system.writing import write_whole


class Tracker(Protocol):
    """Shows the events of a run, each a line of metrics.jsonl."""

    name: str

    def record(self, event: Mapping[str, Any]) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is not written yet."""


def wanted_trackers(recipe: Recipe) -> list[str]:
    """Return which of our own trackers `training.report_to` names; `all` means those that are installed."""
    wanted = recipe.arguments.get("report_to") or []
    names = {wanted} if isinstance(wanted, str) else set(wanted)
    installed = {name for name in OWN_TRACKERS if "all" in names and find_spec(name) is not None}
    return [name for name in OWN_TRACKERS if name in names | installed]


def build_trackers(recipe: Recipe, folder: Path, earlier: Sequence[Mapping[str, Any]]) -> list[Tracker]:
    """Return the trackers of a run in `folder`, with the events of its earlier lives; one that fails is left out."""
    trackers: list[Tracker] = []
    began = time.time() - (float(earlier[-1]["seconds"]) if earlier else 0.0)
    for name in wanted_trackers(recipe):
        try:
            tracker = BUILT[name](recipe, folder, began)
            for event in earlier:
                tracker.record(event)
            trackers.append(tracker)
        except Exception as error:
            print(f"note: {name} shows nothing of this run: {type(error).__name__}: {error}", flush=True)
    return trackers


class TensorBoard:
    """Event files in `tensorboard/` of the run folder: `tensorboard --logdir runs` shows all runs side by side."""

    name = "tensorboard"

    def __init__(self, recipe: Recipe, folder: Path, began: float) -> None:
        with quiet_libraries():
            from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        for path in place.glob("events.out.tfevents.*"):
            path.unlink()
        self._began = began
        self._writer = SummaryWriter(str(place))

    def record(self, event: Mapping[str, Any]) -> None:
        """Write each number at its step, and at the time that it was measured."""
        for tag, value in tagged(event).items():
            when = self._began + float(event["seconds"])
            self._writer.add_scalar(tag, value, event["step"], walltime=when, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Trackio:
    """A run in trackio's own folder on this machine (TRACKIO_DIR), named as the run folder is; nothing is sent."""

    name = "trackio"

    def __init__(self, recipe: Recipe, folder: Path, began: float) -> None:
        import trackio

        self._hidden = io.StringIO()  # it says where it stores, and how to look, in its own colours
        project = str(recipe.arguments.get("project") or training_keys()["project"].default)
        note = folder / "trackio.json"
        with suppress(OSError, ValueError, KeyError), redirect_stdout(self._hidden):
            earlier = json.loads(note.read_text(encoding="utf-8"))
            for run in list(trackio.Api().runs(earlier["project"])):
                if run.id == earlier["id"]:
                    run.delete()
        with redirect_stdout(self._hidden):
            self._run = trackio.init(
                project, folder.name, config=dict(recipe.resolved), embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        write_whole(note, json.dumps({"project": project, "name": folder.name, "id": self._run.id}) + "\n")

    def record(self, event: Mapping[str, Any]) -> None:
        """Hand over the numbers of a step."""
        self._run.log(tagged(event), step=event["step"])

    def close(self) -> None:
        """Wait until trackio has stored everything."""
        with redirect_stdout(self._hidden):
            self._run.finish()


BUILT: Mapping[str, Callable[[Recipe, Path, float], Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio}


def tagged(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event under the names that transformers gives them there: `train/loss`, `eval/loss`."""
    # The epoch stands beside the loss, and would be there twice where that step was measured, too.
    left_out = ("step", "seconds", "epoch") if "eval_loss" in event else ("step", "seconds")
    named = {}
    for name, value in event.items():
        if name not in left_out and isinstance(value, int | float):
            named[f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"] = value
    return named
