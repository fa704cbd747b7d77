"""What the benchmark for GPUs measures: the settings, their order, and their rows."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from tunebook.training.batches import join_rows, pad_right

# The shortest of uneven rows, as a part of the longest: a fifth of the positions is padding then, as in micro-batches
# of 16 rows that finetune.py lays out by length (benchmarks/padding_share.py measures that).
SHORTEST = 0.6


@dataclass(frozen=True)
class Setting:
    """One way to run a step: `micro_batches` times rows of `length` tokens, or of uneven lengths up to it."""

    length: int
    rows: int
    checkpointing: bool = True
    attention: str = "sdpa"
    uneven: bool = False
    packed: bool = False
    in_pieces: bool = True
    micro_batches: int = 1
    compiled: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        """What is said of it in the table."""
        parts = [f"{self.rows} x {self.length}", f"checkpointing {'on' if self.checkpointing else 'off'}"]
        parts += [self.attention, *["uneven rows"] * self.uneven, *["packed"] * self.packed]
        parts += ["all logits"] * (not self.in_pieces)
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        return ", ".join(parts + ["compiled"] * self.compiled + ["Liger"] * self.liger)

    @property
    def rows_key(self) -> tuple[int, int, bool]:
        """What the rows depend on: settings that share it have the same loss and gradient."""
        return self.length, self.rows, self.uneven


def settings(lengths: tuple[int, int], tokens: int) -> list[Setting]:
    """Return what is measured for two lengths, what matters most first; each micro-batch has `tokens` tokens.

    What compiles comes last, since nobody knows how long that takes.
    """
    short, long = (Setting(length, tokens // length) for length in lengths)
    uneven = replace(short, uneven=True)
    found = [short, long, replace(short, checkpointing=False), replace(long, checkpointing=False)]
    found += [replace(short, micro_batches=2), replace(short, in_pieces=False), uneven, replace(uneven, packed=True)]
    flash, flex = (
        [replace(long, attention=attention), replace(uneven, attention=attention, packed=True)]
        for attention in ("flash_attention_2", "flex_attention")
    )
    liger = [replace(short, liger=True), replace(long, liger=True)]
    return [*found, *flash, *liger, *flex, replace(short, compiled=True)]


def missing_for(setting: Setting) -> str | None:
    """Return what a setting needs that is not here."""
    if setting.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        return "pip install flash-attn"
    if setting.liger and find_spec("liger_kernel") is None:
        return "pip install liger-kernel"
    return None


def build_micro_batch(setting: Setting, vocabulary: int) -> dict[str, Any]:
    """Return rows of random tokens, all trained; the lengths of uneven ones are spread evenly from SHORTEST to all."""
    draw = torch.Generator().manual_seed(0)
    last = max(1, setting.rows - 1)
    parts = [1 - (1 - SHORTEST) * place / last if setting.uneven else 1 for place in range(setting.rows)]
    lengths = [round(part * setting.length) for part in parts]
    tokens = [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in lengths]
    return (join_rows if setting.packed else pad_right)([{"input_ids": row, "labels": row} for row in tokens])
