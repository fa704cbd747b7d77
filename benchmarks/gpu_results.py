"""The figures of a setting, the plan they are held against, and the files of the results."""

import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gpu_model import QWEN_7B, RANK, TINY
from gpu_settings import Setting
from result_files import write_json, write_text
from tunebook.model.attention import kept_for_attention
from tunebook.model.shapes import ModelShape, build_shape, count_lora_parameters
from tunebook.plan.durations import find_gpu, operations_per_token, read_gpu
from tunebook.plan.memory import CONSTANTS_BLOCK, GIB, LOGITS_AT_ONCE, QUANTIZED_BLOCK, predict_memory
from tunebook.plan.storage import FLOAT32, Storage, Work

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel", "flash-attn", "tunebook")
COLUMNS = {
    "tokens/s": "tokens_per_second", "of the GPU's rate": "share_of_rate", "peak GiB": "peak_bytes",
    "planned": "planned_bytes", "planned / peak": "planned_of_peak",
}  # fmt: skip


def find_rate(own_name: str) -> float | None:
    """Return the 16-bit rate of a GPU in TFLOP/s by its own name, or None where it is not known for certain."""
    name = find_gpu(own_name)
    return None if name is None else read_gpu(name).tflops


def find_model_shape(shape: dict[str, Any]) -> ModelShape:
    """Return the shape of the model in the plan's terms."""
    found = build_shape({"model_type": "qwen2", **shape}, "")
    assert found is not None, "Qwen2 is known"
    return found


def figures_of(
    setting: Setting, micro_batch: dict[str, Any], seconds: list[float], shape: ModelShape, rate: float | None
) -> dict[str, Any]:
    """Return speed and padding of a setting whose steps took these `seconds`, in ascending order.

    With the `rate` of the GPU in TFLOP/s also the share of it that the model's own products took, without those that
    checkpointing repeats.
    """
    median, tokens = seconds[len(seconds) // 2], micro_batch["num_row_tokens"] * setting.micro_batches
    padding = 1 - micro_batch["num_row_tokens"] / micro_batch["input_ids"].numel()
    found = {"seconds": round(median, 4), "tokens_per_second": round(tokens / median, 1), "padding": round(padding, 3)}
    if rate is not None:
        operations = operations_per_token(shape, setting.length, checkpointing=False)
        found["share_of_rate"] = round(tokens * operations / median / (rate * 1e12), 3)
    return found


def plan_bytes(setting: Setting, micro_batch: dict[str, Any], shape: ModelShape, compute: int) -> int:
    """Return the bytes that the memory plan gives this setting, where a number of the compute type has `compute`."""
    storage = Storage(
        compute=compute,
        residual=compute,
        frozen=compute,
        copies=compute if compute < FLOAT32 else 0,
        quantized=0.5,
        constants=1 / QUANTIZED_BLOCK + FLOAT32 / QUANTIZED_BLOCK / CONSTANTS_BLOCK,
        dequantized=compute,
    )
    rows, length = micro_batch["input_ids"].shape
    joined = setting.packed and setting.rows > 1  # what is compiled are the layers, which are given their masks
    kept = kept_for_attention(setting.attention, shape, length, joined=joined)
    work = Work(
        rows, length, count_lora_parameters(shape, {}, RANK), RANK, setting.checkpointing,
        keeps_gradients=setting.micro_batches > 1, masked=kept.masked, repeats_keys=kept.repeats_keys,
        logits_at_once=LOGITS_AT_ONCE if setting.in_pieces else None,
    )  # fmt: skip
    return predict_memory(shape, storage, work).total


def read_versions() -> dict[str, str]:
    """Return the versions of what matters, and what is not installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def render_row(cell: dict[str, Any]) -> str:
    """Return a setting as a row of the table: its figures, or why it has none that count."""
    if reason := cell.get("missing") or cell.get("differs"):
        return f"| {cell['setting']} | {reason} |{' |' * len(COLUMNS)}"
    shown = dict(cell)
    if peak := cell.get("peak_bytes"):
        shown |= {"peak_bytes": f"{peak / GIB:.2f}", "planned_of_peak": f"{cell['planned_bytes'] / peak:.3f}"}
    shown["planned_bytes"] = f"{cell['planned_bytes'] / GIB:.2f}"
    remarks = [f"{cell['padding']:.0%} padding"] if cell["padding"] else []
    if "graphs" in cell:
        remarks += [f"graphs: {cell['graphs']}, graph breaks: {cell['graph_breaks']}"]
        remarks += [f"{cell['first_steps_seconds']:.0f} s for the first steps"]
    values = ["" if shown.get(name) is None else str(shown[name]) for name in COLUMNS.values()]
    return f"| {cell['setting']} | {' | '.join([*values, '; '.join(remarks)])} |"


@dataclass
class Results:
    """What was found on a device, to be written to `folder` (None: nowhere) after each setting."""

    folder: Path | None
    device: str
    dtype: str
    shape: dict[str, Any]
    check: dict[str, dict[str, float]]
    measured: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The device's own name."""
        return torch.cuda.get_device_name(self.device) if self.device != "cpu" else f"CPU ({platform.machine()})"

    @property
    def said_of_shape(self) -> str:
        """The shape that was measured, by name and in numbers."""
        named = "Qwen2.5-7B's shape" if self.shape == QWEN_7B else "The tiny shape" if self.shape == TINY else "A shape"
        numbers = f"{self.shape['num_hidden_layers']} layers, {self.shape['hidden_size']} wide"
        return f"{named} ({numbers}, vocabulary {self.shape['vocab_size']:,})"

    def render(self) -> str:
        """Return the figures as a Markdown table."""
        head = f"| setting | {' | '.join(COLUMNS)} | remarks |"
        return "\n".join([head, "|---" * (len(COLUMNS) + 2) + "|", *map(render_row, self.measured)])

    def write(self) -> None:
        """Write gpu.json and gpu.md."""
        if self.folder is None:
            return
        head = f"# {self.name}, {time.strftime('%Y-%m-%d')}\n\n"
        head += f"{self.said_of_shape}, random weights, NF4, LoRA r={RANK}, {self.dtype}. "
        head += f"Small model in bfloat16, how far off: {self.check}. {read_versions()}"
        write_text(self.folder / "gpu.md", f"{head}\n\n{self.render()}\n")
        model = {"tiny": self.shape == TINY, "shape": self.shape, "dtype": self.dtype}
        result = {"gpu": self.name, **model, "check": self.check, "versions": read_versions()}
        write_json(self.folder / "gpu.json", {**result, "measured": self.measured})
