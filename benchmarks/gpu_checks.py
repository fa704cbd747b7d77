"""Whether a step computes what it should: loss and gradient of one way against those of another.

Every figure is how far something is off, so that 0 is the same and a limit is the most allowed. A value that is no
number is within no limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from gpu_model import TINY, add_adapter, build_base, dequantized, mean_loss, quantize
from tunebook.training import head_loss
from tunebook.training.batches import IGNORED_LABEL, pad_right

# Rows of the small model. Divided by their 230 labels, what leaves the head's loss is off by 0.33 % once the divisor is
# rounded to bfloat16's 8 bits, and by 0.005 % where only the products are.
CHECKED_LENGTHS = (129, 65, 30, 10)
# How much the small model's head is enlarged: random logits are so small that any hidden state has the loss ln(V).
SHARPER = 5
# bfloat16 against float32, with the loss made at once: measured on a CPU, five seeds, 0.0004, 0.0001, 0.006, 0.003;
# the seed used here 0.00001, 0.0001, 0.002, 0.0001. A layer left out: 0.07 to 0.4 of the loss; one scaled by 1 %: 0.01
# in the norms of its own gradient.
FLOAT32_LIMITS = {"loss_off": 1e-3, "worst_cosine_off": 1e-3, "worst_norm_off": 7e-3, "mean_ratio_off": 4e-3}
# The loss in pieces against that made at once, in bfloat16 both: measured 0, 0.0001, 0.002, 0.0004.
PIECES_LIMITS = {"loss_off": 1e-4, "worst_cosine_off": 1e-3, "worst_norm_off": 7e-3, "mean_ratio_off": 1e-3}
# Settings on the same rows. 28 layers in bfloat16, sdpa, eager and packed: 0.000008, 0.0001, 0.001. Rows that see each
# other: 0.001, 0.6, 0.6; no causal mask 0.0001, 0.9, 0.9; one norm left out 0.0006, 0.014, 0.003.
SETTING_LIMITS = {"loss_off": 1e-3, "cosine_off": 5e-3, "mean_ratio_off": 2e-2}


@dataclass(frozen=True)
class Step:
    """The loss of a step and the gradient of each trained matrix, on the CPU."""

    loss: float
    gradients: Mapping[str, Any]

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return float(sum(one.double().square().sum() for one in self.gradients.values()) ** 0.5)


def read_gradients(model: Any) -> dict[str, Any]:
    """Return a copy of each trained matrix's gradient, on the CPU."""
    return {
        name: weight.grad.detach().to("cpu", copy=True)
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def compare(found: Step, expected: Step) -> dict[str, float]:
    """Return how far a step is off another: loss, cosine and mean ratio of the whole gradient, and its worst matrices.

    The mean ratio is the gradient's part along the one expected, over the latter. In bfloat16 it is far more exact than
    any single number, since their roundings cancel; a factor does not.
    """
    assert found.gradients.keys() == expected.gradients.keys(), "the same matrices are trained"
    pairs = [(found.gradients[name].double(), one.double()) for name, one in expected.gradients.items()]
    sums = torch.stack([torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]) for a, b in pairs])
    products, ours, theirs = sums.T
    product, our, their = sums.sum(dim=0)
    figures = {
        "loss_off": abs(torch.tensor(found.loss / expected.loss - 1)),
        "cosine_off": 1 - product / (our * their).sqrt(),
        "mean_ratio_off": (product / their - 1).abs(),
        "worst_cosine_off": (1 - products / (ours * theirs).sqrt()).max(),  # torch's max of a NaN is one
        "worst_norm_off": ((ours / theirs).sqrt() - 1).abs().max(),
    }
    return {name: round(float(figure), 7) for name, figure in figures.items()}


def beyond(figures: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Return which figures are beyond their limits, and how far."""
    return [f"{name} {figures[name]:.2g} > {most:g}" for name, most in limits.items() if not figures[name] <= most]


def tell_difference(found: Step, expected: Step) -> str | None:
    """Return how a setting's first step differs from that of another on the same rows; None where it is rounding."""
    off = beyond(compare(found, expected), SETTING_LIMITS)
    losses = f"loss {found.loss:.4f}, expected {expected.loss:.4f}"
    return f"computes something else: {losses}; {', '.join(off)}" if off else None


def check_small_model(device: str) -> dict[str, dict[str, float]]:
    """Return how far NF4 in bfloat16 is off float32 on the same weights, and its loss in pieces off that made at once.

    Ends the program where either is beyond its limits.
    """
    base = build_base(TINY, "cpu", torch.bfloat16)  # the same numbers on every device
    base.lm_head.weight.data.mul_(SHARPER)
    held = quantize(base.to(device), device, torch.bfloat16)
    exact, model = add_adapter(dequantized(held, TINY, device)), add_adapter(held)
    rows = build_checked_rows(exact, device)
    at_once = run_step(model, rows, device, torch.bfloat16)
    with patch.object(head_loss, "LOGITS_AT_ONCE", 16 * TINY["vocab_size"]):
        in_pieces = run_step(model, rows, device, torch.bfloat16)
    found = {
        "float32": compare(at_once, run_step(exact, rows, device, torch.float32)),
        "in pieces": compare(in_pieces, at_once),
    }
    off = beyond(found["float32"], FLOAT32_LIMITS)
    if off:
        raise SystemExit(f"NF4 does not compute what float32 does: {', '.join(off)}")
    off = beyond(found["in pieces"], PIECES_LIMITS)
    if off:
        raise SystemExit(f"The loss in pieces is not that made at once: {', '.join(off)}")
    return found


def build_checked_rows(model: Any, device: str) -> dict[str, Any]:
    """Return random rows as one micro-batch, whose labels are what the model holds likeliest.

    They make the loss depend on the hidden states: of other labels all states alike know nothing.
    """
    draw, rows = torch.Generator().manual_seed(0), []
    for length in CHECKED_LENGTHS:
        tokens = torch.randint(TINY["vocab_size"], (length,), generator=draw)
        with torch.no_grad():
            likeliest = model(input_ids=tokens[None].to(device)).logits[0].argmax(dim=-1).tolist()
        rows.append({"input_ids": tokens.tolist(), "labels": [IGNORED_LABEL, *likeliest[:-1]]})
    return pad_right(rows)


def run_step(model: Any, micro_batch: dict[str, Any], device: str, dtype: torch.dtype) -> Step:
    """Return loss and gradients of one micro-batch."""
    model.zero_grad()
    made = head_loss.HeadLoss(model, str(dtype).removeprefix("torch."))
    loss = mean_loss(model, made, micro_batch, device, dtype)
    loss.backward()
    return Step(loss.item(), read_gradients(model))
