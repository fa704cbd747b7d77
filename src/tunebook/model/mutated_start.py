"""Adapters that start from the base's own weights (PiSSA, OLoRA), and how they come out as plain LoRA.

Such a start takes its part out of the base: W = R + s B0 A0, and R is what is trained upon. Loaded onto W, an adapter
(A, B) would add B0 A0 twice, unless the reader decomposes W once more and gets the same parts, which a random
decomposition (pissa_niter_N) doesn't give. What is saved is therefore the difference, a LoRA of twice the rank on W
itself (Meng et al. 2024, PiSSA, appendix C): s (B A - B0 A0) = s [B, -B0] [A; A0].
"""

import math
import re
from collections.abc import Mapping
from typing import Any

A_MATRIX = re.compile(r"\.lora(_embedding)?_A\b")
MATRIX = re.compile(r"\.lora(_embedding)?_[AB]\b")


def changes_base(lora: Mapping[str, Any] | None) -> bool:
    """Whether the `lora` section asks for a start that takes its part out of the base weights."""
    start = (lora or {}).get("init_lora_weights")
    return isinstance(start, str) and (start.startswith("pissa") or start == "olora")


def keep_start(model: Any) -> None:
    """Keep a copy of the untrained adapter with the model, on the CPU."""
    model.adapter_start = {name: value.detach().cpu().clone() for name, value in _lora_parameters(model).items()}


def has_kept_start(model: Any) -> bool:
    """Whether the model started from its base's own weights."""
    return getattr(model, "adapter_start", None) is not None


def as_plain_lora(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's tensors as those of a LoRA on the unchanged base: twice the rank, the start taken off."""
    import torch

    plain = dict(tensors)
    for full_name, value in model.adapter_start.items():
        name = re.sub(r"\.default(?=\.|$)", "", full_name)  # as peft names it in files
        is_a = A_MATRIX.search(name) is not None
        plain[name] = torch.cat([plain[name], value if is_a else -value], dim=0 if is_a else 1).contiguous()
    return plain


def plain_config(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of adapter_config.json that go with `as_plain_lora`: the same scale at twice the rank."""
    factor = math.sqrt(2) if written["use_rslora"] else 2

    def patterns(name: str, times: float) -> dict[str, float]:
        return {pattern: number * times for pattern, number in (written.get(name) or {}).items()}

    return {
        "r": 2 * written["r"],
        "lora_alpha": factor * written["lora_alpha"],
        "rank_pattern": patterns("rank_pattern", 2),
        "alpha_pattern": patterns("alpha_pattern", factor),
        "init_lora_weights": True,
    }


def _lora_parameters(model: Any) -> dict[str, Any]:
    """Return the matrices of all targets; on embeddings they start at a product of zero, and nothing changes them."""
    matrices = {name: value for name, value in model.named_parameters() if MATRIX.search(name)}
    assert matrices, "an adapter has matrices"
    return matrices
