"""How much of a base is quantised and how much of it an adapter reaches: the share of the weights in its layers.

Both go to linear layers. Experts of a mixture are often one large parameter, and some models have linear layers of a
class of their own, which transformers leaves as they are: what a recipe calls "4 bits" or "all linear layers" can be a
small part of the model. Embeddings, the output head and norms are not counted.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunebook.errors import Problem
from tunebook.model.lora_reach import whole_modules
from tunebook.model.lora_targets import takes_all_linear

MOST_NAMED = 6
LOW_BITS = ("Params4bit", "Int8Params")  # how bitsandbytes holds them
ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save|token_adapter|trainable_tokens_\w+)\.")


def check_quantisation(model: Any, quantization: Mapping[str, Any], lora: Mapping[str, Any] | None) -> list[Problem]:
    """Return why a base that is quantised so is none, or holds what is to be trained whole; `model` has no weights."""
    layers = quantised_layers(model, quantization)
    if not layers:
        kinds = sorted({type(owner).__name__ for _, owner, _ in _matrices(model)})
        message = f"transformers quantises no {' and no '.join(kinds)}, and the layers of this model are such"
        return [Problem(message, "Remove the section, for plain LoRA", key="quantization")]
    problems = [
        Problem(f"{name} matches no linear layer", "Name layers, not blocks", key="quantization.llm_int8_skip_modules")
        for name in quantization.get("llm_int8_skip_modules") or []
        if _unmatched_by([name], model) == _unmatched_by([], model)
    ]
    whole = whole_modules(model, lora or {})
    held = {whole[id(module)] for name, module in model.named_modules() if name in layers and id(module) in whole}
    if held:
        message = f"{', '.join(sorted(held))} is held in {_bits(quantization)} bits, and cannot be trained whole"
        fix = "Make it a target of LoRA, or remove the quantization section"
        problems.append(Problem(message, fix, key="lora.modules_to_save"))
    return problems


def quantised_layers(model: Any, quantization: Mapping[str, Any]) -> set[str]:
    """Return the names of the layers that transformers will quantise, by its own rule; `model` has no weights."""
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = skipped_modules(quantization) or get_keys_to_not_convert(model)
    return _unmatched_by([*kept, *(model._keep_in_fp32_modules or [])], model)


def _unmatched_by(kept: list[str], model: Any) -> set[str]:
    """Return the names of the linear layers that none of `kept` matches."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    return {
        name
        for name, module in model.named_modules()
        if (type(module) is Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }


def skipped_modules(quantization: Mapping[str, Any]) -> list[str]:
    """Return what stays unquantised where the recipe has a list, which replaces transformers' own; else nothing.

    The head is always among it: one that is tied to the embedding cannot be quantised.
    """
    given = quantization.get("llm_int8_skip_modules")
    return sorted({*given, "lm_head"}) if given else []


def quantisation_notes(model: Any, quantization: Mapping[str, Any] | None, dtype: str) -> list[str]:
    """Return which weights of the layers are not quantised; `model` is loaded, or as yet without weights or adapter.

    `dtype` is the compute type, in which they are held.
    """
    if quantization is None:
        return []
    layers = quantised_layers(model, quantization) if model.device.type == "meta" else set()
    kept, share = _shared_out(model, lambda name, _, weight: name in layers or type(weight).__name__ in LOW_BITS)
    if not kept:
        return []
    held = f"{share:.0%} of the weights of all layers are in {_bits(quantization)} bits"
    return [f"quantization: {held}; {_listed(kept)} stay in {dtype}"]


def adapter_notes(model: Any, lora: Mapping[str, Any] | None) -> list[str]:
    """Return which weights of the layers get no LoRA, where the targets are all linear layers; `model` has it on."""
    if lora is None or not takes_all_linear(lora) or lora.get("layers_to_transform") or lora.get("exclude_modules"):
        return []
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    reached: set[int] = set()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            base, own = module.get_base_layer(), getattr(module, "parameter_name", None)
            reached |= {id(getattr(base, own))} if own else {id(one) for one in base.parameters(recurse=False)}
        elif isinstance(module, ModulesToSaveWrapper):
            reached |= {id(one) for one in module.parameters()}
    kept, share = _shared_out(model.get_base_model(), lambda name, _, weight: id(weight) in reached)
    if not kept:
        return []
    return [f"lora: {share:.0%} of the weights of all layers get LoRA; {_listed(kept)} get none"]


def _shared_out(model: Any, is_taken: Callable[[str, Any, Any], bool]) -> tuple[list[str], float]:
    """Return the names of the weights that are not taken, without layer numbers, and the share of those that are."""
    taken, whole, kept = 0, 0, set()
    for name, owner, weight in _matrices(model):
        number = _num_weights(weight)
        whole += number
        if is_taken(name.removesuffix(".weight"), owner, weight):
            taken += number
        else:
            kept.add(re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight"))
    return sorted(kept), taken / max(whole, 1)


def _matrices(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return name, module and weight of all matrices of a base, embeddings and the output head aside."""
    from torch.nn import Embedding

    head = model.get_output_embeddings()
    around = {id(one) for module in model.modules() if isinstance(module, Embedding) for one in module.parameters()}
    around |= {id(one) for one in head.parameters()} if head is not None else set()
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}".replace(".base_layer", "").replace(".original_module", "")
            is_adapter = ADAPTER.search(full_name) is not None
            if weight.ndim > 1 and id(weight) not in around and not is_adapter:
                yield full_name, module, weight


def _num_weights(weight: Any) -> int:
    """Return how many weights a parameter holds; 4-bit ones are packed by twos."""
    state = getattr(weight, "quant_state", None)
    return math.prod(state.shape if state is not None else weight.shape)


def _bits(quantization: Mapping[str, Any]) -> int:
    return 4 if quantization.get("load_in_4bit") else 8


def _listed(names: list[str]) -> str:
    """Return names on one line; many of them are cut."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
