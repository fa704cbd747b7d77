"""A merged model on disk: tokenizer and settings written beside the weights, and all of it read back and checked."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.merge.merging import save_merged
from tunebook.model.adapter import write_tokenizer


@dataclass(frozen=True)
class Made:
    """What a merged model has to come back with: its type, the rows of its embedding, and whether the head is tied."""

    dtype: Any
    num_rows: int
    is_tied: bool


def save_model(merged: Any, tokenizer: Any, adapter: Path, folder: Path) -> Made:
    """Write a merged model to `folder` with its tokenizer, template and the adapter's generation settings."""
    save_merged(merged, folder)
    write_tokenizer(tokenizer, folder)
    shutil.copyfile(adapter / "generation_config.json", folder / "generation_config.json")
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    return Made(merged.dtype, embedding.weight.shape[0], head is not None and head.weight is embedding.weight)


def load_saved(folder: Path, made: Made, tokenizer: Any, stop_token_ids: Sequence[int]) -> tuple[Any, list[str]]:
    """Return the model in `folder` as anybody loads it, and what is wrong with it, its config and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    again = AutoTokenizer.from_pretrained(folder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows, written = embedding.weight.shape[0], json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stops = model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    others = {str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()} - {str(made.dtype)}
    faults = {
        f"weights are missing: {sorted(loading['missing_keys'])[:3]}": loading["missing_keys"],
        f"weights are unknown: {sorted(loading['unexpected_keys'])[:3]}": loading["unexpected_keys"],
        f"weights came back in {', '.join(sorted(others))}, not in {made.dtype}": others,
        "its config speaks of quantisation": "quantization_config" in written,
        f"its embedding has {num_rows} rows instead of {made.num_rows}": num_rows != made.num_rows,
        f"its config says {model.config.get_text_config().vocab_size} rows of {num_rows}": (
            model.config.get_text_config().vocab_size != num_rows
        ),
        f"its tokenizer has ids up to {max(again.get_vocab().values())} for {num_rows} rows": (
            max(again.get_vocab().values()) >= num_rows
        ),
        "its head is tied to the embedding, or not, unlike the model that was merged": (
            head is not None and (head.weight is embedding.weight) != made.is_tied
        ),
        "its tokenizer has other tokens than the adapter's": again.get_vocab() != tokenizer.get_vocab(),
        "its chat template is another one": again.chat_template != tokenizer.chat_template,
        f"it stops at {sorted(stops)} instead of {list(stop_token_ids)}": not set(stop_token_ids) <= stops,
    }
    return model.eval(), [text for text, is_wrong in faults.items() if is_wrong]
