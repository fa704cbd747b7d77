"""`tunebook merge`: an adapter put into its base, saved as a model of its own once it has proved itself."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunebook.errors import EXIT_DONE, EXIT_FAILED, Problem, Refused
from tunebook.exported import exported_folder
from tunebook.finished import Finished, open_finished
from tunebook.merge_target import MERGED_TYPES, check_room, find_merge_problems, new_folder
from tunebook.merged_card import render_merged_card
from tunebook.places import is_local
from tunebook.verdict import Readings, judge, render_verification
from tunebook.verifying import Probe, Reading, build_probe, read_in, read_model
from tunebook.writing import explain_unwritten, write_whole


class NotProven(RuntimeError):
    """A merged model is not what the adapter makes of its base; nothing of it stays on the disk."""


def merge(run_dir: str, out: str, dtype: str | None = None) -> int:
    """Merge the adapter of a run, or of a checkpoint, into its unquantised base, and write it to the folder `out`.

    `dtype` is the type of its weights, by default that in which the base was published. Returns the exit code: 1 where
    the merged model differs from the adapter by more than rounding explains, or the disk is full; nothing is left then.
    Raises Refused where there is nothing to merge, or no place for it.
    """
    finished, target = _on_its_own_base(open_finished(run_dir)), Path(out).expanduser()
    if problems := find_merge_problems(finished, target, dtype):
        raise Refused(problems)
    from tunebook.quiet import quiet_libraries

    with quiet_libraries():
        from safetensors import SafetensorError

        from tunebook.published import check_unquantised

        check_unquantised(finished.recipe)
        try:
            with exported_folder(finished) as adapter:
                _merge_into(finished, adapter, target, dtype)
        except NotProven as error:
            print(f"failed: {error}. Nothing was kept", file=sys.stderr)
            return EXIT_FAILED
        # torch and safetensors have errors of their own for a full disk.
        except (OSError, SafetensorError) as error:
            print(f"failed: {explain_unwritten(error, target)}. Nothing was kept", file=sys.stderr)
            return EXIT_FAILED
    print(f"merged:  {target}")
    return EXIT_DONE


def _on_its_own_base(finished: Finished) -> Finished:
    """Return the run with the commit of the base that it was trained on: a branch may have moved since."""
    named, commit = finished.recipe.model, finished.summary.get("model_revision")
    if is_local(named.name_or_path) or commit is None:
        return finished
    model = named.model_copy(update={"revision": commit})
    return replace(finished, recipe=replace(finished.recipe, model=model))


def _merge_into(finished: Finished, adapter: Path, target: Path, dtype: str | None) -> None:
    """Merge, save, read back and judge; raise NotProven where the result is not what it should be."""
    import torch

    from tunebook.data.tokenizer import load_tokenizer
    from tunebook.merging import Scratch, merge_weights
    from tunebook.published import load_published
    from tunebook.saved_model import load_saved, save_model

    base, tokenizer = load_published(finished.recipe), load_tokenizer(str(adapter))
    kind = _type_of(base) if dtype is None else getattr(torch, dtype)
    check_room(target, 2 * base.num_parameters() * kind.itemsize)  # beside the model itself, what was merged of it
    print(f"adapter: {finished.source}")
    print(f"base:    {finished.recipe.model.name_or_path}, published in {_name(base.dtype)}; merged in {_name(kind)}")
    probe = build_probe(finished, tokenizer)
    with new_folder(target) as folder:
        model, unmerged = _read_unmerged(finished, base, adapter, tokenizer, probe, kind)
        scratch = Scratch(folder / ".merging")
        made = save_model(merge_weights(model, kind, scratch), tokenizer, adapter, folder)
        shutil.rmtree(scratch.folder)
        loaded, faults = load_saved(folder, made, tokenizer, probe.stop_token_ids)
        readings = Readings(merged=read_model(loaded, probe), **unmerged)
        found = judge(readings, probe, _name(kind), scratch.relative_error)
        text = render_verification(found, _quantisation(finished))
        print(f"\n{text}\n")
        print("\n".join([*_other_answers(readings, probe, tokenizer), ""]))
        if not found.passed:
            message = (
                f"the merged model's logits differ by {found.merged.largest:.2g}, and {found.allowed:.2g} is allowed"
            )
            faults.append(message if kind == torch.float32 else f"{message}; --dtype float32 rounds least")
        if faults:
            raise NotProven("; ".join(faults))
        write_whole(folder / "README.md", render_merged_card(finished, text))


def _read_unmerged(  # noqa: PLR0913, PLR0917 - what they say depends on all of it
    finished: Finished, base: Any, adapter: Path, tokenizer: Any, probe: Probe, kind: Any
) -> tuple[Any, dict[str, Reading]]:
    """Return the adapter on its unquantised base, ready to be merged, and what all but the merged model say."""
    import torch

    from tunebook.merging import put_adapter_on
    from tunebook.new_tokens import make_room
    from tunebook.trained import load_trained

    said = {}
    if finished.recipe.quantization is not None:
        said["trained"] = read_model(load_trained(finished).model, probe)
    if finished.recipe.model.add_special_tokens:
        make_room(base, tokenizer)
    said["base"] = read_in(torch.float32, base, probe, answers=False)
    if kind != torch.float32:
        said["rounded_base"] = read_in(kind, base, probe, answers=False)
    model = put_adapter_on(base, adapter)
    said["adapter"] = read_in(torch.float32, model, probe, answers=kind == torch.float32)
    said["answered"] = said["adapter"] if kind == torch.float32 else read_in(kind, model, probe)
    return model, said


def _other_answers(readings: Readings, probe: Probe, tokenizer: Any) -> list[str]:
    """Return a line for each prompt that the merged model answers in other words than the adapter does."""
    lines = []
    for number, answers in enumerate(zip(readings.merged.answers, readings.answered.answers, strict=True), 1):
        if answers[0] != answers[1]:
            merged, adapter = (" ".join(tokenizer.decode(ids).split()) for ids in answers)
            lines.append(f"prompt {number} of {len(probe.prompts)}: merged {merged!r}, adapter {adapter!r}")
    return lines


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
