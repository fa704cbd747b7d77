"""What can only be known on a GPU, in one command of under 8 minutes.

python benchmarks/gpu.py            on the first GPU; writes benchmarks/results/gpu.md and gpu.json
python benchmarks/gpu.py --tiny     the same from end to end on any machine, to find typing mistakes; writes nothing

A model of Qwen2.5-7B's shape with random weights in NF4, LoRA of rank 16 on all linear layers. First loss and gradient
on a small shape against float32, then tokens a second, peak memory and the share of the GPU's rate for each setting,
and that memory against the plan's. Nothing is downloaded or installed; what is missing is named.
"""

import argparse
import gc
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_model import QWEN_7B, RANK, TINY, add_adapter, build_base, dequantized, quantize
from tunebook.model.attention import kept_for_attention
from tunebook.model.shapes import ModelShape, build_shape, count_lora_parameters
from tunebook.plan.durations import operations_per_token, read_gpu
from tunebook.plan.memory import CONSTANTS_BLOCK, LOGITS_AT_ONCE, QUANTIZED_BLOCK, predict_memory
from tunebook.plan.storage import Storage, Work
from tunebook.training.batches import join_rows, pad_right, tensors_of
from tunebook.training.head_loss import HeadLoss

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 440
WARMUP, STEPS, SECONDS_EACH = 2, 5, 12
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel", "flash-attn", "tunebook")
# Loss and gradient of NF4 in bfloat16 against float32 on the same weights.
LOSS_OFF, COSINE = 0.02, 0.98


@dataclass(frozen=True)
class Setting:
    """One way to run a micro-batch: rows of `length` tokens, or of uneven lengths up to it."""

    length: int
    rows: int
    checkpointing: bool = True
    attention: str = "sdpa"
    uneven: bool = False
    packed: bool = False
    in_pieces: bool = True
    compiled: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        """What is said of it in the table."""
        parts = [
            f"{self.rows} x {self.length}",
            f"checkpointing {'on' if self.checkpointing else 'off'}",
            self.attention,
        ]
        parts += ["uneven rows"] * self.uneven + ["packed"] * self.packed + ["all logits"] * (not self.in_pieces)
        return ", ".join(parts + ["compiled"] * self.compiled + ["Liger"] * self.liger)


def settings(lengths: tuple[int, int], tokens: int) -> list[Setting]:
    """Return what is measured for two lengths, what matters most first; each micro-batch has `tokens` tokens."""
    short, long = (Setting(length, tokens // length) for length in lengths)
    found = [short, long]
    found += [replace(one, checkpointing=False, rows=max(1, one.rows // 4)) for one in (short, long)]
    found += [replace(short, in_pieces=False), replace(short, uneven=True), replace(short, uneven=True, packed=True)]
    for attention in ("flash_attention_2", "flex_attention"):
        found += [replace(long, attention=attention)]
        found += [replace(short, attention=attention, uneven=True, packed=True)]
    return [*found, replace(short, compiled=True), replace(short, liger=True), replace(long, liger=True)]


def missing_for(setting: Setting) -> str | None:
    """Return what a setting needs that is not here."""
    if setting.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        return "pip install flash-attn"
    if setting.liger and find_spec("liger_kernel") is None:
        return "pip install liger-kernel"
    return None


def build_micro_batch(setting: Setting, vocabulary: int) -> dict[str, Any]:
    """Return rows of random tokens, all trained; uneven ones have 1/16 to all of the length, by turns."""
    draw = torch.Generator().manual_seed(0)
    lengths = [
        setting.length // (1 << place % 5) if setting.uneven else setting.length for place in range(setting.rows)
    ]
    tokens = [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in lengths]
    return (join_rows if setting.packed else pad_right)([{"input_ids": row, "labels": row} for row in tokens])


def compare_with_float32(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return loss and gradient of a small NF4 model against float32 on the same weights; exit where they are off."""
    held = quantize(build_base(TINY, device, dtype), device, dtype)
    models = [add_adapter(dequantized(held, TINY, device)), add_adapter(held)]
    batch, losses, gradients = build_micro_batch(Setting(64, 4, uneven=True), TINY["vocab_size"]), [], []
    for model, compute in zip(models, (torch.float32, dtype), strict=True):
        loss = run_forward(model, HeadLoss(model, str(compute).removeprefix("torch.")), batch, device, compute)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0).item()
    found = {"loss_off": abs(losses[1] / losses[0] - 1), "gradient_cosine": cosine}
    if found["loss_off"] > LOSS_OFF or cosine < COSINE:
        raise SystemExit(f"NF4 does not compute what float32 does: {found}")
    return found


def run_forward(model: Any, head_loss: HeadLoss, batch: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Return the mean loss of a micro-batch, as finetune.py computes it."""
    inputs, targets = tensors_of(batch, device), tensors_of(batch["targets"], device)
    with torch.autocast(device.partition(":")[0], dtype=dtype, enabled=dtype != torch.float32):
        return head_loss.sums(model, inputs, targets).loss / batch["num_trained_tokens"]


class Bench:
    """The model, and what was measured with it."""

    def __init__(self, shape: dict[str, Any], device: str, dtype: torch.dtype, deadline: float) -> None:
        self.shape, self.device, self.dtype, self.deadline = shape, device, dtype, deadline
        self.on_gpu = device.startswith("cuda")
        self.model_shape = find_model_shape(shape)
        self.model = self._build()
        self.rate = find_rate(torch.cuda.get_device_name(device)) if self.on_gpu else None

    def _build(self) -> Any:
        return add_adapter(quantize(build_base(self.shape, self.device, self.dtype), self.device, self.dtype))

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Return the figures of a setting, or why there are none."""
        if reason := missing_for(setting):
            return {"setting": setting.name, "missing": reason}
        if time.monotonic() > self.deadline:
            return {"setting": setting.name, "missing": "no time left"}
        try:
            return {"setting": setting.name, **asdict(setting), **self._run(setting)}
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except (RuntimeError, ValueError, ImportError) as error:  # NotImplementedError is a RuntimeError
            # --tiny is there to find mistakes before a GPU is paid for; what a CPU cannot do (flex's backward) is none.
            if not (self.on_gpu or isinstance(error, NotImplementedError)):
                raise
            reason = " ".join(str(error).split())[:200]
        self.model.zero_grad()
        gc.collect()
        return {"setting": setting.name, "missing": reason}

    def _run(self, setting: Setting) -> dict[str, Any]:
        model = self._prepared(setting)
        head_loss = HeadLoss(self.model, str(self.dtype).removeprefix("torch."), setting.in_pieces)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=self.on_gpu)
        batch, seconds = build_micro_batch(setting, self.shape["vocab_size"]), []
        began = time.monotonic()
        for step in range(WARMUP + STEPS):
            if step == WARMUP and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            start = time.perf_counter()
            run_forward(model, head_loss, batch, self.device, self.dtype).backward()
            optimizer.step()
            optimizer.zero_grad()
            self._wait()
            seconds.append(time.perf_counter() - start)
            if step > WARMUP and time.monotonic() - began > SECONDS_EACH:
                break
        timed = sorted(seconds[WARMUP:])
        return self._figures(setting, batch, timed[len(timed) // 2])

    def _prepared(self, setting: Setting) -> Any:
        self.model.train()
        if setting.checkpointing:
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            self.model.enable_input_require_grads()
        else:
            self.model.activation_checkpointing_disable()
        self.model.get_base_model().set_attn_implementation(setting.attention)
        if setting.liger:  # it changes the model for good, so it comes last
            liger = import_module("liger_kernel.transformers")
            liger.apply_liger_kernel_to_qwen2(model=self.model.get_base_model(), fused_linear_cross_entropy=False)
        for layer in self.model.get_base_model().model.layers:
            layer._compiled_call_impl = None
            if setting.compiled:  # layer by layer: the head is used in pieces; without inductor where it takes minutes
                layer.compile(backend="inductor" if self.on_gpu else "eager")
        return self.model

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _figures(self, setting: Setting, batch: dict[str, Any], seconds: float) -> dict[str, Any]:
        tokens = batch["num_row_tokens"]
        found: dict[str, Any] = {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}
        if self.rate:
            operations = operations_per_token(self.model_shape, setting.length, checkpointing=False)
            found["share_of_rate"] = round(tokens * operations / seconds / (self.rate * 1e12), 3)
        if self.on_gpu:
            peak, planned = torch.cuda.max_memory_allocated(), self._planned(setting, batch)
            found |= {"peak_gib": round(peak / 2**30, 2), "planned_gib": round(planned / 2**30, 2)}
            found["planned_of_peak"] = round(planned / peak, 3)
        return found

    def _planned(self, setting: Setting, batch: dict[str, Any]) -> int:
        """Return the bytes that the memory plan gives this micro-batch."""
        constants = 1 / QUANTIZED_BLOCK + 4 / QUANTIZED_BLOCK / CONSTANTS_BLOCK
        storage = Storage(compute=2, residual=2, frozen=2, copies=2, quantized=0.5, constants=constants, dequantized=2)
        rows, length = batch["input_ids"].shape
        joined = setting.packed and setting.rows > 1  # what is compiled are the layers, which are given their masks
        kept = kept_for_attention(setting.attention, self.model_shape, length, joined=joined)
        work = Work(
            rows, length, count_lora_parameters(self.model_shape, {}, RANK), RANK, setting.checkpointing,
            masked=kept.masked, repeats_keys=kept.repeats_keys,
            logits_at_once=LOGITS_AT_ONCE if setting.in_pieces else None,
        )  # fmt: skip
        return predict_memory(self.model_shape, storage, work).total


def find_model_shape(shape: dict[str, Any]) -> ModelShape:
    """Return the shape of the model in the plan's terms."""
    found = build_shape({"model_type": "qwen2", **shape}, "")
    assert found is not None, "Qwen2 is known"
    return found


def find_rate(name: str) -> float | None:
    """Return the 16-bit rate of a GPU in TFLOP/s by its own name, or None where it is not known."""
    words = name.lower().replace("-", " ").split()
    known = ("h200", "h100", "a100", "l40s", "a6000", "4090", "3090", "5090", "a10", "l4", "t4")
    return next((read_gpu(one).tflops for one in known if one in words), None)


def versions() -> dict[str, str]:
    """Return the versions of what matters, and what is not installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def render_table(measured: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    names = ("tokens_per_second", "share_of_rate", "peak_gib", "planned_gib", "planned_of_peak")
    lines = [
        "| setting | tokens/s | of the GPU's rate | peak GiB | planned | planned / peak |",
        "|---|---|---|---|---|---|",
    ]
    for one in measured:
        cells = [str(one.get(name, "")) for name in names] if "missing" not in one else [one["missing"], *[""] * 4]
        lines.append(f"| {one['setting']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Check, measure, print, and write the results of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any machine; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of gpu.md and gpu.json")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("No GPU is here. --tiny runs everything on the CPU, with a tiny model")
    given.out.mkdir(parents=True, exist_ok=True)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    began = time.monotonic()
    check = compare_with_float32(device, dtype)
    print(f"small NF4 model against float32: {check}", flush=True)
    bench = Bench(TINY if given.tiny else QWEN_7B, device, dtype, began + SECONDS)
    measured = []
    for setting in settings((64, 128), 256) if given.tiny else settings((512, 2048), 8192):
        measured.append(bench.measure(setting))
        print(json.dumps(measured[-1]), flush=True)
    table = render_table(measured)
    print(table)
    if given.tiny:
        return
    name = torch.cuda.get_device_name(device)
    head = f"# {name}, {time.strftime('%Y-%m-%d')}\n\nQwen2.5-7B's shape, random weights, NF4, LoRA r=16, {dtype}."
    text = f"{head} Small model against float32: {check}. {versions()}\n\n{table}\n"
    (given.out / "gpu.md").write_text(text, encoding="utf-8")
    result = {"gpu": name, "check": check, "versions": versions(), "measured": measured}
    (given.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
