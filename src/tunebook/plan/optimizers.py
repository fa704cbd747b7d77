"""How much memory the optimizers of transformers take, by name."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class OptimizerBytes(NamedTuple):
    """Bytes of state for each trained weight, and those that a step computes with.

    `at_once` are for each trained weight, `of_largest` for each weight of the largest tensor.
    """

    states: float
    at_once: float = 0
    of_largest: float = 0


# torch's own take all tensors at once on a GPU (foreach), and one after another on a CPU: (states, at once on a GPU, of
# the largest tensor on a CPU), float32 copies by the source of torch 2.13's optim. Fused ones copy nothing.
IN_TURN: Final[Mapping[str, tuple[float, float, float]]] = {
    "adamw_torch": (8, 4, 8), "adamw_torch_fused": (8, 0, 0), "sgd": (0, 0, 0), "adagrad": (4, 8, 4),
    "rmsprop": (4, 4, 4),
}  # fmt: skip
# Of others. Those of 8 bits have a float32 scale for each block of 256 of a moment, those of 4 bits one of 128
# (torchao). Adafactor's moment is a row and a column; its step takes tensor by tensor, and two copies of one
# (transformers, optimization.Adafactor.step).
OTHERS: Final[Mapping[str, OptimizerBytes]] = {
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), OptimizerBytes(2 + 8 / 256)
    ),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), OptimizerBytes(1 + 4 / 256)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), OptimizerBytes(3 + 12 / 256)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), OptimizerBytes(4)),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), OptimizerBytes(12)),
    "paged_adamw_32bit": OptimizerBytes(8),
    "adamw_torch_4bit": OptimizerBytes(1 + 8 / 128),
    "adafactor": OptimizerBytes(0, 0, 8),
}


def find_optimizer_bytes(name: str, on_gpu: bool, assumed: list[str]) -> OptimizerBytes:
    """Return what an optimizer takes; `assumed` is told where it is counted as another one."""
    if name in OTHERS:
        return OTHERS[name]
    if name not in IN_TURN:
        assumed.append(f"the states of {name} are counted as AdamW's")
    states, at_once, of_largest = IN_TURN.get(name, IN_TURN["adamw_torch"])
    return OptimizerBytes(states, at_once) if on_gpu else OptimizerBytes(states, 0, of_largest)
