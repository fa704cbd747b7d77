"""`tunebook merge`: an adapter put into its base, saved as a model of its own once it has proved itself."""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tunebook.card.card import CardFacts, render_card
from tunebook.card.files import write_card
from tunebook.card.loss_picture import read_metrics
from tunebook.errors import EXIT_DONE, EXIT_FAILED, Problem, Refused
from tunebook.export.export import facts_of
from tunebook.export.exported import exported_folder
from tunebook.export.finished import Finished, open_finished
from tunebook.export.past_base import check_base
from tunebook.merge.computing import give_back_freed_memory
from tunebook.merge.target import MERGED_TYPES, check_room, find_merge_problems, new_folder
from tunebook.merge.verdict import Readings, judge, render_answers, render_verification
from tunebook.merge.verifying import Probe, answer_greedily, build_probe, read_model
from tunebook.system.writing import explain_unwritten


class NotProven(RuntimeError):
    """A merged model is not what the adapter makes of its base; nothing of it stays on the disk."""


def merge(run_dir: str, out: str, dtype: str | None = None, base: str | None = None) -> int:
    """Merge the adapter of a run, or of a checkpoint, into its unquantised base, and write it to the folder `out`.

    `dtype` is the type of its weights, by default that in which the base was published; `base` is where that
    lies now. Returns the exit code: 1 where
    the merged model differs from the adapter by more than rounding explains, or the disk is full; nothing is left then.
    Raises Refused where there is nothing to merge, or no place for it.
    """
    finished, target = open_finished(run_dir, base), Path(out).expanduser()
    if problems := find_merge_problems(finished, target, dtype):
        raise Refused(problems)
    check_base(finished)
    facts = card_facts(finished)
    from tunebook.system.quiet import quiet_libraries

    with quiet_libraries():
        from safetensors import SafetensorError

        from tunebook.merge.published import check_unquantised

        check_unquantised(finished.recipe)
        try:
            with exported_folder(finished) as adapter:
                _merge_into(finished, adapter, target, dtype, facts)
        except NotProven as error:
            print(f"failed: {error}. Nothing was kept", file=sys.stderr)
            return EXIT_FAILED
        # torch and safetensors have errors of their own for a full disk.
        except (OSError, SafetensorError) as error:
            print(f"failed: {explain_unwritten(error, target)}. Nothing was kept", file=sys.stderr)
            return EXIT_FAILED
    print(f"merged:  {target}")
    return EXIT_DONE


def _merge_into(finished: Finished, adapter: Path, target: Path, dtype: str | None, facts: CardFacts) -> None:
    """Merge, save, read back and judge; raise NotProven where the result is not what it should be."""
    import torch

    from tunebook.data.tokenizer import load_tokenizer
    from tunebook.merge.saved_model import load_saved

    give_back_freed_memory()
    tokenizer = load_tokenizer(str(adapter))
    base = _load_base(finished, tokenizer)
    kind = _type_of(base) if dtype is None else getattr(torch, dtype)
    check_room(target, 2 * base.num_parameters() * kind.itemsize)  # beside the model itself, what was merged of it
    print(f"adapter: {finished.source}")
    print(f"base:    {finished.recipe.model.name_or_path}, published in {_name(base.dtype)}; merged in {_name(kind)}")
    probe = build_probe(finished, tokenizer)
    with new_folder(target) as folder:
        made, weight_error = _write_merged(base, tokenizer, adapter, folder, kind)
        del base
        model, faults = load_saved(folder, made, tokenizer, probe.stop_token_ids)
        readings = _read_all(finished, model, adapter, tokenizer, probe, kind)
        found = judge(readings, probe, _name(kind), weight_error)
        text = render_verification(found, _quantisation(finished))
        print("\n".join(["", text, "", *render_answers(readings, tokenizer), ""]))
        if not found.passed:
            message = (
                f"the merged model's logits differ by {found.merged.largest:.2g}, and {found.allowed:.2g} is allowed"
            )
            faults.append(message if kind == torch.float32 else f"{message}; --dtype float32 rounds least")
        if faults:
            raise NotProven("; ".join(faults))
        _write_card(finished, folder, text, facts)


def card_facts(finished: Finished) -> CardFacts:
    """Return what the card is made of. Raises Refused where it could not be made, before anything is computed."""
    try:
        facts = facts_of(finished)
        render_card(facts, verification="-")
    except (KeyError, TypeError) as error:
        message = f"run_summary.json or plan.json lacks {error}: this run is of another version of tunebook"
        raise Refused(Problem(message, "Merge it with that version", str(finished.folder))) from error
    return facts


def _write_card(finished: Finished, folder: Path, verification: str, facts: CardFacts) -> None:
    """Write the card of the merged model, with the losses up to the weights that were merged."""
    step = finished.checkpoint.step if finished.checkpoint else None
    for note in write_card(folder, facts, read_metrics(finished.folder, step), verification):
        print(f"note: {note}")


def _load_base(finished: Finished, tokenizer: Any) -> Any:
    """Return the unquantised base, with rows for added tokens as they stood before training."""
    from tunebook.merge.published import load_published
    from tunebook.model.new_tokens import make_room, start_rows

    base = load_published(finished.recipe)
    if tokens := finished.recipe.model.add_special_tokens:
        make_room(base, tokenizer)
        start_rows(base, tokenizer.convert_tokens_to_ids(tokens))
    return base


def _write_merged(base: Any, tokenizer: Any, adapter: Path, folder: Path, kind: Any) -> tuple[Any, float]:
    """Write the merged model; return what it must come back with, and the error of its rounded weights."""
    from tunebook.merge.merging import Scratch, merge_weights, put_adapter_on
    from tunebook.merge.saved_model import save_model

    scratch = Scratch(folder / ".merging")
    merged = merge_weights(put_adapter_on(base, adapter), kind, scratch)
    made = save_model(merged, tokenizer, adapter, folder)
    shutil.rmtree(scratch.folder)
    return made, scratch.relative_error


def _read_all(  # noqa: PLR0913, PLR0917 - each is of another model
    finished: Finished, merged: Any, adapter: Path, tokenizer: Any, probe: Probe, kind: Any
) -> Readings:
    """Let the merged model answer, and return what it and all it is compared with say to that."""
    import torch

    from tunebook.merge.merging import put_adapter_on
    from tunebook.using.trained import load_trained

    answers = answer_greedily(merged, probe)
    read = partial(read_model, probe=probe, answers=answers)
    said = {"merged": read(merged)}
    base = _load_base(finished, tokenizer)  # the first one became the merged model
    said["base"] = read(base, dtype=torch.float32)
    if kind != torch.float32:
        said["rounded_base"] = read(base, dtype=kind)
    said["adapter"] = read(put_adapter_on(base, adapter), dtype=torch.float32)
    del base
    if finished.recipe.quantization is not None:
        said["trained"] = read(load_trained(finished).model)
    return Readings(answers=answers, **said)


def _type_of(base: Any) -> Any:
    """Return the type that the base was published in. Raises Refused where no merged model is saved in it."""
    if _name(base.dtype) in MERGED_TYPES:
        return base.dtype
    fix = f"Give one of {', '.join(MERGED_TYPES)} by --dtype"
    raise Refused(Problem(f"the base was published in {_name(base.dtype)}", fix, "--dtype"))


def _quantisation(finished: Finished) -> str:
    return "8-bit" if (finished.recipe.quantization or {}).get("load_in_8bit") else "4-bit"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
