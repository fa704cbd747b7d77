"""Measures one setting after another on a model that stays as it is, and keeps the results after each."""

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers.models.qwen2 import modeling_qwen2

from gpu_checks import Step, read_gradients, tell_difference
from gpu_model import add_adapter, apply_liger, build_base, mean_loss, quantize
from gpu_results import Results, figures_of, find_model_shape, find_rate, plan_bytes
from gpu_settings import Setting, build_micro_batch, missing_for
from tunebook.training.head_loss import HeadLoss
from tunebook.training.probing import checkpointing

WARMUP, STEPS, SECONDS_EACH = 2, 5, 12
SECONDS_TO_COMPILE = 120  # without so many left it is not begun


class Bench:
    """The model, and the first step of each setting that was the first on its rows."""

    def __init__(self, shape: dict[str, Any], device: str, dtype: torch.dtype, deadline: float) -> None:
        """Build the model; no setting is begun after `deadline`, in seconds of time.monotonic."""
        self.shape, self.device, self.dtype, self.deadline = shape, device, dtype, deadline
        self.on_gpu = device.startswith("cuda")
        self.model_shape = find_model_shape(shape)
        self.rate = find_rate(torch.cuda.get_device_name(device)) if self.on_gpu else None
        self._expected: dict[tuple[int, int, bool], Step] = {}
        self._plain_module = dict(vars(modeling_qwen2))
        self.model: Any = None
        self._build(liger=False)

    def _build(self, liger: bool) -> None:
        """Build the model anew: the same weights, on which Liger's kernels can be put but not taken off again."""
        self.model = None
        self._free()
        vars(modeling_qwen2).update(self._plain_module)
        base = quantize(build_base(self.shape, self.device, self.dtype), self.device, self.dtype)
        model = add_adapter(base).train()
        if liger:
            apply_liger(base)
        self.model, self._has_liger = model, liger

    def _free(self) -> None:
        """Give back what the last setting left behind, also where it failed."""
        if self.model is not None:
            self.model.zero_grad()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Return the figures of a setting, or why there are none."""
        reason = missing_for(setting)
        needed = SECONDS_TO_COMPILE if setting.compiled else 0
        if reason is None and time.monotonic() + needed > self.deadline:
            reason = "no time left"
        if reason is not None:
            return {"setting": setting.name, "missing": reason}
        try:
            return {"setting": setting.name, **asdict(setting), **self._run(setting)}
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except Exception as error:  # of a kernel or a compiler: it may be any, and the other settings are to be had
            # --tiny is there to find mistakes before a GPU is paid for; what a CPU cannot do (flex's backward) is none.
            if not (self.on_gpu or isinstance(error, NotImplementedError)):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return {"setting": setting.name, "missing": reason}

    def _run(self, setting: Setting) -> dict[str, Any]:
        self._free()
        if self.model is None or self._has_liger != setting.liger:
            self._build(setting.liger)
        base = self.model.get_base_model()
        base.set_attn_implementation(setting.attention)
        # Before anything is compiled, since it looks at the model with rows of another shape.
        head_loss = HeadLoss(self.model, str(self.dtype).removeprefix("torch."), setting.in_pieces)
        micro_batch = build_micro_batch(setting, self.shape["vocab_size"])
        counters.clear()
        layers = base.model.layers if setting.compiled else []
        with (
            checkpointing(self.model, setting.checkpointing, {"use_reentrant": False}),
            _compiled(layers, "inductor" if self.on_gpu else "eager"),  # inductor takes minutes on a CPU
        ):
            first, seconds = self._time_steps(setting, head_loss, micro_batch)
        planned = plan_bytes(setting, micro_batch, self.model_shape, self.dtype.itemsize)
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else None
        found = figures_of(setting, micro_batch, sorted(seconds[WARMUP:]), self.model_shape, self.rate)
        found |= {"planned_bytes": planned, "peak_bytes": peak, "first_steps_seconds": round(sum(seconds[:WARMUP]), 2)}
        if (graphs := counters["stats"]["unique_graphs"]) or setting.compiled:
            found |= {"graphs": graphs, "graph_breaks": sum(counters["graph_break"].values())}
        return {**found, **self._compare_first(setting, first)}

    def _time_steps(
        self, setting: Setting, head_loss: HeadLoss, micro_batch: dict[str, Any]
    ) -> tuple[Step, list[float]]:
        """Return the first step, and the seconds of each."""
        trained = [one for one in self.model.parameters() if one.requires_grad]
        # The same work as with any other rate, but the weights stay as they are for the next setting.
        optimizer = torch.optim.AdamW(trained, lr=0.0, fused=self.on_gpu)
        seconds: list[float] = []
        for number in range(WARMUP + STEPS):
            if number == WARMUP and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            start = time.perf_counter()
            for _ in range(setting.micro_batches):
                loss = mean_loss(self.model, head_loss, micro_batch, self.device, self.dtype)
                (loss / setting.micro_batches).backward()
            if number == 0:
                first = Step(loss.item(), read_gradients(self.model))
            optimizer.step()
            optimizer.zero_grad()
            self._wait()
            seconds.append(time.perf_counter() - start)
            if sum(seconds[WARMUP:]) > SECONDS_EACH:
                break
        return first, seconds

    def _compare_first(self, setting: Setting, first: Step) -> dict[str, Any]:
        """Return loss and gradient norm of the first step, and how it differs from that of others on the same rows."""
        difference = tell_difference(first, self._expected.get(setting.rows_key, first))
        if difference is None:
            self._expected.setdefault(setting.rows_key, first)
        found = {"loss": round(first.loss, 6), "gradient_norm": float(f"{first.norm:.6g}")}
        return {**found, "differs": difference} if difference else found

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@contextmanager
def _compiled(layers: Sequence[Any], backend: str) -> Iterator[None]:
    """Have the layers compiled inside, each for itself: the head is used in pieces.

    Their graphs are for these shapes alone, and it is an error where there would be so many that torch gives up and
    runs a layer as it is.
    """
    if not layers:
        yield
        return
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend=backend, dynamic=False)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def measure_all(bench: Bench, wanted: Sequence[Setting], results: Results) -> None:
    """Measure each setting, print its figures and keep the results, so that none is lost with a later one."""
    results.measured = [{"setting": setting.name, "missing": "not reached"} for setting in wanted]
    for place, setting in enumerate(wanted):
        results.measured[place] = bench.measure(setting)
        print(json.dumps(results.measured[place]), flush=True)
        results.write()
