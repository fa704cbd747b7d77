"""An adapter put into the weights of its base, one layer after another, in memory that does not grow with the model.

The base is mapped from its files in the type it was published in. Each adapted layer is copied to float32, merged there
by peft's own code for its kind (LoRA, rsLoRA, DoRA, embeddings, convolutions of GPT-2, parameters of experts, rows of
new tokens), rounded once to the type asked for and written to a file beside the target, from which it is mapped again.
Rounded twice, to the base's type before the sum and after it, bfloat16 would lose about half as much again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.using.trained import fitting

SHARD_SIZE = "5GB"


@dataclass
class Scratch:
    """A folder of weights that are mapped from their files.

    `change` and `error` are sums of squares over all merged layers: of what the adapter changes, and of what rounding
    takes from it.
    """

    folder: Path
    change: float = 0.0
    error: float = 0.0
    _numbers: Iterator[int] = field(default_factory=count)

    def keep(self, tensor: Any, name: str) -> Any:
        """Return the same numbers mapped from a file. Raises Refused where a number is none, OSError on a full disk."""
        import torch

        if not bool(torch.isfinite(tensor).all()):
            if tensor.dtype == torch.float16 and not bool(torch.isnan(tensor).any()):
                message = f"{name} has numbers that float16 cannot hold"
                raise Refused(Problem(message, "Use --dtype bfloat16 or float32", "--dtype"))
            message = f"{name} with the adapter in it is not a number everywhere (NaN or infinite)"
            raise Refused(Problem(message, "No type helps: adapter or base is damaged, or training went astray"))
        flat = tensor.detach().contiguous().reshape(-1)
        if not flat.numel():
            return tensor
        self.folder.mkdir(exist_ok=True)
        path = self.folder / str(next(self._numbers))
        # Written, and not filled as a mapping: on a full disk that would end the process by a signal.
        with path.open("wb") as file:
            file.write(memoryview(flat.view(torch.uint8).numpy()))
        return torch.from_file(str(path), shared=False, size=flat.numel(), dtype=tensor.dtype).reshape(tensor.shape)

    @property
    def relative_error(self) -> float:
        """What rounding takes from the adapter's change of the weights, as a part of it."""
        return math.sqrt(self.error / self.change) if self.change else 0.0


def put_adapter_on(base: Any, folder: Path) -> Any:
    """Return a PeftModel of the adapter in `folder`, all it trained in float32, on a base of any type, on the CPU."""
    import torch
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    # "Trainable" marks all that the file holds, saved modules and biases too, which come in the base's own type.
    with fitting(folder):
        model = PeftModel.from_pretrained(base, folder, is_trainable=True, torch_device="cpu")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    return model.requires_grad_(False).eval()


def merge_weights(model: Any, dtype: Any, scratch: Scratch) -> Any:
    """Return the base of a PeftModel with the adapter in its weights, all of them in `dtype`; `model` is used up."""
    import torch

    was_tied = bool(model.config.get_text_config().tie_word_embeddings)
    with torch.no_grad():
        for name, unit in _adapted(model.get_base_model(), ""):
            _merge_unit(unit, name, dtype, scratch)
        merged = model.merge_and_unload()  # all is merged already, which leaves the unwrapping
        for name, parameter in merged.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = scratch.keep(parameter.data.to(dtype), name)
    _settle_head(merged, was_tied)
    return merged


def save_merged(merged: Any, folder: Path) -> None:
    """Write the config without quantisation, and the weights as safetensors, to `folder`."""
    from transformers import GenerationConfig

    # The base's may be ones that transformers refuses to save; those of the adapter are written afterwards.
    merged.generation_config = GenerationConfig()
    assert getattr(merged.config, "quantization_config", None) is None, "the base is loaded unquantised"
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def _adapted(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the outermost modules that peft has put around those of the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _adapted(child, f"{path}.{name}".removeprefix("."))


def _merge_unit(unit: Any, name: str, dtype: Any, scratch: Scratch) -> None:
    """Merge the adapter around one module of the base, in float32, and round the result to `dtype`."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    # The rows of new tokens inside an adapted embedding first: the adapter adds to them.
    layers = [module for module in reversed(list(unit.modules())) if isinstance(module, BaseTunerLayer)]
    before = {}
    for layer in layers:
        base, chosen = layer.get_base_layer(), getattr(layer, "parameter_name", None)
        for key, weight in [*base.named_parameters(recurse=False)]:
            if chosen in (None, key) and (base, key) not in before:
                before[base, key] = weight.data
                # A parameter of its own, as a tied head has the same one; a copy, as the mapped file is the base's.
                exact = torch.nn.Parameter(weight.data.to(torch.float32, copy=True), requires_grad=False)
                setattr(base, key, exact)
    for layer in layers:
        try:
            layer.merge()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # a trained bias on layers that have none
            reason = " ".join(str(error).split()).rstrip(".")
            raise Refused(Problem(f"{name} cannot be merged: {reason}", "Use the adapter as it is")) from error
    for (base, key), was in before.items():
        exact = getattr(base, key).data
        rounded = exact.to(dtype)
        scratch.change += float((exact - was.to(torch.float32)).square().sum())
        scratch.error += float((exact - rounded.to(torch.float32)).square().sum())
        getattr(base, key).data = scratch.keep(rounded, f"{name}.{key}")


def _settle_head(merged: Any, was_tied: bool) -> None:
    """Tie head and embedding again where both came out equal; say in the config that they are apart where not."""
    import torch

    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    is_tied = was_tied and torch.equal(head.weight, embedding.weight)
    if is_tied:
        head.weight = embedding.weight
    for config in (merged.config, merged.config.get_text_config()):
        config.tie_word_embeddings = is_tied
