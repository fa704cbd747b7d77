"""What came out of a run in the form that others load: the adapter folder of its end, or one made of a checkpoint."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.export.finished import Finished
from tunebook.export.past_base import check_base, check_tokenizer
from tunebook.launching.world import world_of
from tunebook.model.mutated_start import as_plain_lora, changes_base


@contextmanager
def exported_folder(finished: Finished) -> Iterator[Path]:
    """Give the folder of what came out, as others load it: with weights, their config, tokenizer and template.

    For a checkpoint it is made in a temporary place and gone afterwards.
    """
    if finished.checkpoint is None:
        yield finished.whole_adapter
        return
    with tempfile.TemporaryDirectory(prefix="tunebook-") as place:
        folder = Path(place) / finished.checkpoint.folder.name
        folder.mkdir()
        # A whole model need not be on the disk twice for a moment.
        fill_from_checkpoint(finished, folder, lambda source, target: target.symlink_to(source.absolute()))
        yield folder


def fill_from_checkpoint(finished: Finished, folder: Path, bring: Callable[[Path, Path], object]) -> tuple[str, ...]:
    """Fill an empty folder with what the run would have left had it ended with the checkpoint.

    `bring` puts a file of weights at its new place. The base must be there: of most adapters its config, of those that
    changed it their whole weights. Returns notes for the user. Raises Refused where base or template cannot be had any
    more.
    """
    check_base(finished)
    from tunebook.system.quiet import quiet_libraries

    with quiet_libraries():
        from tunebook.data.chat_prompts import find_stop_token
        from tunebook.data.tokenizer import tokenizer_of
        from tunebook.model.adapter import fill_adapter_folder

    recipe, checkpoint = finished.recipe, finished.checkpoint
    assert checkpoint is not None
    tokenizer = tokenizer_of(recipe)
    # Asked in any case: it gives the tokenizer the recipe's template. Plain texts end with another token.
    of_template = find_stop_token(tokenizer, recipe.data.template)
    check_tokenizer(finished, tokenizer)
    stop_token_id = int(finished.summary.get("stop_token_id", of_template))
    with quiet_libraries():
        if recipe.lora is None:
            _fill_whole_model(checkpoint.folder, folder, tokenizer, stop_token_id, bring)
            return ()
        model, tensors = _adapter_of(finished, tokenizer)
        return fill_adapter_folder(model, tokenizer, recipe, folder, stop_token_id, tensors)


def _adapter_of(finished: Finished, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model of the run, without its weights where that will do, and the tensors of the checkpoint."""
    from safetensors.torch import load_file

    from tunebook.model.model import build_model, build_outline

    recipe, folder = finished.recipe, finished.source
    tensors = load_file(folder / "adapter_model.safetensors")
    if not changes_base(recipe.lora):
        return build_outline(recipe, tokenizer), tensors
    device, trained_on = finished.plan.device_type, finished.summary.get("device")
    if device != trained_on:
        message = f"the start of this adapter was drawn on {trained_on}, and {device} would draw another one"
        fix = "Export the checkpoint on a machine like that of the run, or the run's end"
        raise Refused(Problem(message, fix, str(folder)))
    model = build_model(recipe, finished.plan, world_of(1, "cuda" if device == "cuda" else "cpu"), tokenizer)
    return model, as_plain_lora(model, tensors)


def _fill_whole_model(
    checkpoint: Path, folder: Path, tokenizer: Any, stop_token_id: int, bring: Callable[[Path, Path], object]
) -> None:
    """Fill a folder with the checkpoint of a full fine-tune, without what is there only to go on from it."""
    from transformers import GenerationConfig

    from tunebook.model.adapter import restore_cache, write_generation_config, write_tokenizer

    for path in sorted(checkpoint.glob("model*.safetensors")):
        bring(path, folder / path.name)
    for path in (*checkpoint.glob("model.safetensors.index.json"), checkpoint / "config.json"):
        shutil.copyfile(path, folder / path.name)
    restore_cache(folder / "config.json")
    write_tokenizer(tokenizer, folder)
    write_generation_config(GenerationConfig.from_pretrained(checkpoint), tokenizer, stop_token_id, folder)
