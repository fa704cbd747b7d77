"""What comes out of a run: the adapter in PEFT's form, ready to be loaded.

A full fine-tune has no adapter: its whole model is written in the same way, in the float32 it was trained in.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.launching.sharding import whole
from tunebook.model.lora_targets import short_names, takes_all_linear
from tunebook.model.mutated_start import as_plain_lora, has_kept_start, plain_config
from tunebook.model.new_tokens import largest_id
from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local
from tunebook.system.quiet import quiet_libraries
from tunebook.system.writing import folder_to_fill

# What transformers writes into tokenizer_config.json of the place and the way it was loaded.
OF_THIS_MACHINE = frozenset({
    "is_local", "local_files_only", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "cache_dir",
    "_commit_hash", "token",
})  # fmt: skip


def write_adapter(  # noqa: PLR0913, PLR0917 - the tensors only where the model itself is sharded
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    folder: Path,
    stop_token_id: int,
    tensors: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Write adapter (or model), tokenizer with chat template, and generation settings to `folder`, whole or not at all.

    Called on rank 0 alone, with the `tensors` that all ranks have put together where the model is sharded. Files are
    equal from run to run for equal weights. Returns notes for the user, such as that the adapter names its base by a
    local path.
    """
    with folder_to_fill(folder) as beside, quiet_libraries():
        if recipe.lora is not None:
            tensors = exported_tensors(model) if tensors is None else tensors
            return fill_adapter_folder(model, tokenizer, recipe, beside, stop_token_id, tensors)
        model.save_pretrained(beside)
        restore_cache(beside / "config.json")
        write_tokenizer(tokenizer, beside)
        write_generation_config(model.generation_config, tokenizer, stop_token_id, beside)
    return ()


def fill_adapter_folder(  # noqa: PLR0913, PLR0917 - what an adapter is made of
    model: Any, tokenizer: Any, recipe: Recipe, folder: Path, stop_token_id: int, tensors: Mapping[str, Any]
) -> tuple[str, ...]:
    """Fill an empty folder with an adapter's tensors and all that goes with them; `model` needs no weights.

    Returns notes for the user.
    """
    _write_tensors(tensors, folder)
    notes = _write_adapter_config(model, tokenizer, recipe, folder)
    write_tokenizer(tokenizer, folder)
    base_stops = write_generation_config(model.generation_config, tokenizer, stop_token_id, folder)
    if stop_token_id not in base_stops:
        stop = tokenizer.convert_ids_to_tokens(stop_token_id)
        # transformers and peft read these settings from the base, also where an adapter brings its own.
        notes += (f"the base itself does not stop at {stop}: load the adapter as its README.md says, or merge it",)
    return notes


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer without what transformers notes of this machine: whether and from where it was loaded here."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in written.items() if name not in OF_THIS_MACHINE}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def restore_cache(config: Path) -> None:
    """Take `use_cache: false`, which is about training, out of a saved model's config.json; true is the default."""
    written = json.loads(config.read_text(encoding="utf-8"))
    written.pop("use_cache", None)
    _write_json(config, written)


def write_adapter_weights(model: Any, folder: Path) -> None:
    """Write `adapter_model.safetensors` of a PeftModel into an existing folder, as a checkpoint needs it."""
    _write_tensors(adapter_tensors(model), folder)


def _write_tensors(tensors: Mapping[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def exported_tensors(model: Any) -> dict[str, Any]:
    """Return the tensors of what a run gives to others: as they were trained, or as plain LoRA on an unchanged base."""
    tensors = adapter_tensors(model)
    return as_plain_lora(model, tensors) if has_kept_start(model) else tensors


def adapter_tensors(model: Any) -> dict[str, Any]:
    """Return what a run trains, by name, on the CPU: the adapter's tensors, or all weights of a full fine-tune.

    Collective where the model is sharded.
    """
    from peft import PeftModel, get_peft_model_state_dict

    # The base's embedding has no place in the adapter, which holds the rows of new tokens itself; asking peft to decide
    # ("auto") makes it look for the base on the Hub.
    is_adapter = isinstance(model, PeftModel)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False) if is_adapter else model.state_dict()
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in sorted(tensors.items())}


def tensor_sha256(tensors: Mapping[str, Any]) -> str:
    """Return one hash over name, type, shape and bytes of all tensors, sorted by name: of numbers, not of a file."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write_adapter_config(model: Any, tokenizer: Any, recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """Write peft's own fields, in the order that makes two runs equal, with the base under its public name."""
    written = model.peft_config["default"].to_dict()
    if takes_all_linear(recipe.lora or {}):
        # peft writes full paths for small models and parts of them for large ones, in the order of a set.
        written["target_modules"] = short_names(model.get_base_model(), model.targeted_module_names)
    written = {name: sorted(value) if isinstance(value, set) else value for name, value in written.items()}
    if isinstance(written["target_modules"], list):
        written["target_modules"] = sorted(written["target_modules"])
    base, revision, notes = _named_base(model, recipe)
    rows = model.get_base_model().get_input_embeddings().weight.shape[0]
    if recipe.model.add_special_tokens and rows == largest_id(tokenizer) + 1:
        notes += (f"a base with fewer rows is resized to {rows} first; AutoPeftModelForCausalLM does it by itself",)
    if has_kept_start(model):
        notes += (f"it started from the base's own weights, and is saved as plain LoRA of rank {2 * written['r']}",)
        written |= plain_config(written)
    written |= {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    _write_json(folder / "adapter_config.json", written)
    return notes


def public_base(recipe: Recipe) -> str | None:
    """Return the name by which others find the base; None for a folder whose public name the recipe does not give."""
    if recipe.model.base_id is not None:
        return recipe.model.base_id
    return None if is_local(recipe.model.name_or_path) else recipe.model.name_or_path


def _named_base(model: Any, recipe: Recipe) -> tuple[str, str | None, tuple[str, ...]]:
    named = recipe.model
    if named.base_id is not None:
        return named.base_id, named.revision, ()
    if not is_local(named.name_or_path):
        return named.name_or_path, getattr(model.config, "_commit_hash", None) or named.revision, ()
    note = f"the adapter names its base by the local path {named.name_or_path}; set model.base_id to its public name"
    return named.name_or_path, None, (note,)


def write_generation_config(base: Any, tokenizer: Any, stop_token_id: int, folder: Path) -> set[int]:
    """Write a base's GenerationConfig with the token that ends an answer among those that stop it.

    They are written as plain JSON: transformers refuses to save some settings that published models have. Returns the
    ids at which the base itself stops.
    """
    written = {name: value for name, value in base.to_diff_dict().items() if not name.startswith("_")}
    stops = written.get("eos_token_id", tokenizer.eos_token_id)
    base_stops = set(stops if isinstance(stops, list) else [stops] if stops is not None else [])
    written["eos_token_id"] = [stop_token_id, *sorted(base_stops - {stop_token_id})]
    if tokenizer.pad_token_id is not None:
        written["pad_token_id"] = tokenizer.pad_token_id
    _write_json(folder / "generation_config.json", written)
    return base_stops


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
