"""`tunebook export`: what came out of a run as a folder for others, with nothing of this machine in it."""

import filecmp
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.card.card import PICTURE, CardFacts
from tunebook.card.files import CARD, write_card
from tunebook.card.licence import Licence, find_licence
from tunebook.card.loss_picture import read_metrics
from tunebook.card.public_text import last_part
from tunebook.errors import Problem, Refused
from tunebook.export.exported import fill_from_checkpoint
from tunebook.export.finished import Finished, explain_taken, open_finished
from tunebook.export.past_base import base_stops, check_base, has_its_base
from tunebook.hub.files import check_no_links
from tunebook.model.adapter import public_base
from tunebook.plan.table import build_console, print_notes
from tunebook.recipe.schema import Recipe
from tunebook.runs.checkpoints import step_of
from tunebook.system.writing import explain_unwritten, find_fault_of_place, folder_beside, put_in_place


@dataclass(frozen=True)
class Export:
    """What was exported: the folder that holds the weights, the one that was filled, and notes for the user.

    `is_new` is False where the same export stood there already.
    """

    source: Path
    folder: Path
    notes: tuple[str, ...]
    is_new: bool


def export(run_dir: str, out: str | None = None, base: str | None = None) -> Export:
    """Write the adapter folder of a run, or of one of its checkpoints, to `out`, whole or not at all.

    By default that is `exports/<run>`, or `exports/<run>-checkpoint-N`; `base` is where its base lies now. Raises
    Refused where there is nothing to export, and where the target is no place for it: inside a run folder, a file, or a
    folder that holds anything else than this very export.
    """
    finished = open_finished(run_dir, base)
    if base is not None:
        check_base(finished)
    folder = _target(finished, out)
    beside = None
    try:
        beside = folder_beside(folder)
        notes = _fill(finished, beside)
        is_new = not folder.exists() or not any(folder.iterdir())
        if is_new:
            put_in_place(beside, folder)
        elif not _is_same(beside, folder):
            fix = "Name another folder by --out, or delete that one"
            raise Refused(Problem("holds something else than this export", fix, str(folder)))
    except OSError as error:
        raise Refused(Problem(explain_unwritten(error, folder), "Make room, or use --out DIR", "--out")) from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return Export(finished.source, folder, notes, is_new)


def show_export(run_dir: str, out: str | None, base: str | None = None) -> None:
    """Export and print the weights that were chosen, the notes for the user, and the folder."""
    done, console = export(run_dir, out, base), build_console()
    print_notes(done.notes, console)
    console.print(f"source: {done.source}", markup=False, soft_wrap=True)
    console.print(f"export: {done.folder}{'' if done.is_new else ' (is there already)'}", markup=False, soft_wrap=True)


def facts_of(finished: Finished) -> CardFacts:
    """Return what the card of a finished run, or of a checkpoint, is made of."""
    folder, recipe = finished.folder, finished.recipe
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(Problem("cannot be read, and the card is made of it", where=str(folder / "plan.json"))) from error
    if not isinstance(plan, dict):
        raise Refused(Problem("cannot be read, and the card is made of it", where=str(folder / "plan.json")))
    step = None if finished.checkpoint is None else finished.checkpoint.step
    summary = finished.summary if step is None else _up_to(finished, step)
    named = {"public_base": base_for_others(recipe, finished.summary)}
    return CardFacts(recipe, plan, {**summary, **named}, _licence_of(finished), step)


def base_for_others(recipe: Recipe, summary: Mapping[str, Any]) -> str | None:
    """Return the name by which others find the base: what the recipe says now, else what the run was loaded by.

    None for a folder; that it was one is told by the summary, wherever one is now.
    """
    told = summary.get("public_base", public_base(recipe))
    is_of_hub = told is not None and told == summary.get("model", told)
    return recipe.model.base_id or (told if is_of_hub else None)


def _licence_of(finished: Finished) -> Licence | None:
    """Return the licence of the very base that the run had; nobody is asked for the name of what was a folder."""
    recipe, commit = finished.recipe, finished.summary.get("model_revision")
    if not has_its_base(finished):
        if recipe.model.base_id is None:
            return None
        recipe = replace(recipe, model=recipe.model.model_copy(update={"name_or_path": recipe.model.base_id}))
    return find_licence(recipe, commit)


def _up_to(finished: Finished, step: int) -> Mapping[str, Any]:
    """Return the summary as it would be had the run ended with the checkpoint; what was not measured there is None."""
    assert finished.checkpoint is not None
    progress = finished.checkpoint.read_progress()
    events = read_metrics(finished.folder, step)
    losses = [event["loss"] for event in events if "loss" in event]
    here: Mapping[str, Any] = next((event for event in events if event["step"] == step and "eval_loss" in event), {})
    before, tokens, seconds = progress["before"], progress["tokens"], progress["training_seconds"]
    total = finished.summary["num_exact_match_rows"] or len(before["answers"])
    return {
        **finished.summary,
        "num_optimizer_steps": step,
        **{f"{name}_tokens": tokens[name] for name in ("trained", "processed", "padded")},
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "eval_loss_before": before["loss"],
        "eval_loss": here.get("eval_loss"),
        "eval_token_accuracy": here.get("eval_token_accuracy"),
        "num_exact_match_rows": total,
        "exact_match_before": before["num_exact_matches"] / total if total else None,
        "exact_match_after": None,
        "training_seconds": seconds,
        "tokens_per_second": tokens["trained"] / seconds if seconds else None,
        "wall_seconds": progress["wall_seconds"],
        "peak_memory_bytes": None,
        "adapter_sha256": None,
    }


def _target(finished: Finished, out: str | None) -> Path:
    """Return the folder to write. Raises Refused where it lies in a run folder, or is a file."""
    name = finished.folder.absolute().resolve().name
    if finished.checkpoint is not None:
        name += f"-checkpoint-{step_of(finished.checkpoint.folder)}"
    folder = Path(out).expanduser() if out else Path("exports") / name
    if fault := find_fault_of_place(folder):
        raise Refused(Problem(fault, "Name another folder by --out", str(folder)))
    place = folder.resolve()
    if reason := explain_taken(place, finished):
        raise Refused(Problem(reason, "Name a folder outside of it by --out", str(folder)))
    if place.exists() and not place.is_dir():
        raise Refused(Problem("is a file", "Name a folder by --out", str(folder)))
    return place if folder.is_symlink() else folder


def _fill(finished: Finished, folder: Path) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if finished.checkpoint is None:
        check_no_links(finished.folder)
        # What was put there since, such as the notes of an upload, is not part of it; the card is made anew.
        left_out = shutil.ignore_patterns(".*", CARD, PICTURE)
        notes = _stop_note(finished)
        shutil.copytree(
            finished.whole_adapter, folder, dirs_exist_ok=True, ignore=left_out, copy_function=shutil.copyfile
        )
    else:
        notes = fill_from_checkpoint(finished, folder, shutil.copyfile)
    notes = tuple(note for note in notes if "local path" not in note)
    notes += name_base(finished, folder)
    return notes + fill_card(finished, folder)


def fill_card(finished: Finished, folder: Path) -> tuple[str, ...]:
    """Write card and picture of a run, or a checkpoint, into a folder; return notes for the user.

    Raises Refused where what it is made of is not there.
    """
    step = None if finished.checkpoint is None else finished.checkpoint.step
    try:
        return write_card(folder, facts_of(finished), read_metrics(finished.folder, step))
    except (KeyError, TypeError) as error:
        message = f"run_summary.json or plan.json lacks {error}: this run is of another version of tunebook"
        raise Refused(Problem(message, "Use that version", str(finished.folder))) from error


def _stop_note(finished: Finished) -> tuple[str, ...]:
    """Return the note that training gave where the base itself does not stop at what ends an answer."""
    from tokenizers import Tokenizer

    stop, stops = finished.summary.get("stop_token_id"), base_stops(finished)
    if finished.recipe.lora is None or stop is None or stops is None or stop in stops:
        return ()
    token = Tokenizer.from_file(str(finished.adapter / "tokenizer.json")).id_to_token(stop)
    return (f"the base itself does not stop at {token}: load the adapter as its README.md says, or merge it",)


def name_base(finished: Finished, folder: Path) -> tuple[str, ...]:
    """Have adapter_config.json name the base as others find it, else by no place of this machine, which is a note."""
    config = folder / "adapter_config.json"
    if not config.is_file():
        return ()
    summary, written = finished.summary, json.loads(config.read_text(encoding="utf-8"))
    public = base_for_others(finished.recipe, summary)
    if public is not None:
        if written.get("base_model_name_or_path") != public:
            written |= {"base_model_name_or_path": public, "revision": finished.recipe.model.revision}
            config.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return ()
    path = str(summary.get("model", written.get("base_model_name_or_path")))
    if (shown := last_part(path)) != path:
        # No name of a model on the Hub looks like this, so that nobody is given a stranger's model of that name.
        path = f"./{shown}"
    if written.get("base_model_name_or_path") != path:
        written["base_model_name_or_path"] = path
        config.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return (f"the adapter names its base {path}, which others do not have; set model.base_id to its public name",)


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files, byte for byte."""
    files = [
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in (one, other)
    ]
    return files[0] == files[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in files[0])
