"""The benchmark for GPUs runs from end to end without one: no minute of a GPU is spent on a typing mistake."""

import json
import os
import subprocess
import sys
import types
import weakref
from importlib.metadata import PackageNotFoundError

import pytest

from checkout import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
OFF = {"loss_off": 0.0, "cosine_off": 0.0}


def typed(*words, options=(), **environ):
    command = [sys.executable, *options, BENCHMARKS / "gpu.py", *words]
    environ = {**os.environ, **environ}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_missing_and_old_packages_are_named_with_what_installs_them():
    import gpu

    def there(name):
        if name == "peft":
            raise PackageNotFoundError(name)
        return {"torch": "2.9.1+cu128", "numpy": "2.2"}[name]

    wanted = ["peft>=0.21,<0.22", "torch>=2.13,<2.15", "numpy>=2.2,<3"]
    line = (
        "peft is not installed, torch 2.9.1+cu128 is too old. Run: pip install 'peft>=0.21,<0.22' 'torch>=2.13,<2.15'"
    )
    assert gpu.tell_missing(wanted, there) == line
    assert gpu.tell_missing(wanted[2:], there) is None


def test_where_nothing_is_installed_it_says_so_in_one_line():
    shown = typed("--tiny", options=["-S"], PYTHONPATH=str(ROOT / "src"))
    assert (shown.returncode, shown.stdout) == (2, "")
    [line] = shown.stderr.splitlines()
    for name in ("torch", "bitsandbytes", "peft", "ruamel.yaml"):
        assert f"{name} is not installed" in line and f" '{name}>=" in line
    assert "typer" not in line, "no command is used"


@pytest.mark.parametrize("kept", [{"tiny": False}, {"gpu": "of before there was a flag"}, [], "no JSON", None])
def test_a_tiny_run_overwrites_no_real_results(kept, tmp_path):
    text = kept if isinstance(kept, str) else json.dumps(kept)
    (tmp_path / "gpu.md").write_text("figures", encoding="utf-8")
    if kept is not None:
        (tmp_path / "gpu.json").write_text(text, encoding="utf-8")
    shown = typed("--tiny", "--out", tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.splitlines()[-1].endswith("holds the results of a real model; give another --out")
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == "figures"


def test_it_ends_in_time_whatever_it_does():
    code = "import gpu, time; gpu.stop_after(0.2, 'out of time'); time.sleep(30)"
    environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (1, "out of time")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA GeForce RTX 4090", 165), ("Tesla T4", 65), ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)  # fmt: skip
def test_a_rate_is_that_of_this_very_gpu_or_none(name, rate):
    from gpu_results import find_rate

    assert find_rate(name) == rate


@pytest.mark.slow
def test_uneven_rows_leave_the_padding_of_rows_laid_out_by_length():
    from gpu_settings import Setting, build_micro_batch

    padded = build_micro_batch(Setting(512, 16, uneven=True), 2048)
    packed = build_micro_batch(Setting(512, 16, uneven=True, packed=True), 2048)
    assert padded["input_ids"].shape == (16, 512) and packed["input_ids"].shape == (1, padded["num_row_tokens"])
    assert padded["num_row_tokens"] / (16 * 512) == pytest.approx(0.8, abs=0.005)


@pytest.mark.slow
def test_the_compared_settings_have_the_same_rows_and_what_compiles_comes_last():
    from gpu_settings import settings

    found = settings((512, 2048), 8192)
    assert {(one.length, one.rows) for one in found} == {(512, 16), (2048, 4)}
    unbounded = [one.compiled or one.attention == "flex_attention" for one in found]
    assert unbounded == sorted(unbounded) and found[-1].compiled
    assert any(one.micro_batches > 1 for one in found)


@pytest.mark.slow
def test_the_share_of_the_rate_and_the_plan_of_a_setting():
    from gpu_model import QWEN_7B
    from gpu_results import figures_of, find_model_shape, plan_bytes, render_row
    from gpu_settings import Setting, build_micro_batch
    from tunebook.model.shapes import count_lora_parameters

    shape, setting = find_model_shape(QWEN_7B), Setting(512, 16)
    batch = build_micro_batch(setting, 1000)
    found = figures_of(setting, batch, [0.9, 1.0, 1.1], shape, 989)
    # 4 operations for each of 7.07e9 weights of products, and 6 x 512 x 3584 a layer for attention
    assert found["share_of_rate"] == pytest.approx(8192 * (4 * 7.07e9 + 6 * 512 * 3584 * 28) / 989e12, abs=0.002)
    assert found["tokens_per_second"] == 8192
    twice, planned = Setting(512, 16, micro_batches=2), plan_bytes(setting, batch, shape, 2)
    assert figures_of(twice, batch, [2.0], shape, None)["tokens_per_second"] == 8192
    held = plan_bytes(twice, batch, shape, 2) - planned
    assert 0 < held <= 4 * count_lora_parameters(shape, {}, 16), "gradients of the micro-batch before"
    cell = {"setting": "one", **found, "planned_bytes": planned, "peak_bytes": 2 * planned}
    assert render_row(cell).split(" | ")[2:6] == ["0.237", f"{planned / 2**29:.2f}", f"{planned / 2**30:.2f}", "0.500"]


@pytest.mark.slow
def test_what_computes_something_else_is_marked_and_wins_no_table():
    import torch

    from gpu_checks import Step, tell_difference
    from gpu_results import render_row

    one = Step(2.0, {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])})
    assert one.norm == pytest.approx(26**0.5)
    near = Step(2.001, {"a": torch.tensor([3.01, 4.0]), "b": torch.tensor([1.0])})
    assert tell_difference(one, one) is None and tell_difference(near, one) is None
    scaled = Step(2.0, {name: 1.03 * gradient for name, gradient in one.gradients.items()})
    turned = Step(2.0, {"a": torch.tensor([4.0, 3.0]), "b": torch.tensor([1.0])})
    other, no_number = Step(2.01, one.gradients), Step(float("nan"), one.gradients)
    assert "mean_ratio_off 0.03 >" in tell_difference(scaled, one) and "cosine_off" in tell_difference(turned, one)
    assert "loss 2.0100, expected 2.0000" in tell_difference(other, one)
    assert "loss nan" in tell_difference(no_number, no_number), "also where nothing was measured before"
    difference = tell_difference(scaled, one)
    cell = {"setting": "fast", "differs": difference, "tokens_per_second": 9e9, "padding": 0, "planned_bytes": 1}
    assert difference in render_row(cell) and "9000000000" not in render_row(cell)


@pytest.mark.slow
def test_the_results_are_written_after_each_setting(tmp_path):
    from gpu_bench import measure_all
    from gpu_model import TINY
    from gpu_results import Results
    from gpu_settings import Setting

    results, written = Results(tmp_path / "new", "cpu", "float32", TINY, {"float32": OFF}), []

    def measure(setting):
        if setting.rows == 2:
            written.append(json.loads((tmp_path / "new" / "gpu.json").read_text(encoding="utf-8"))["measured"])
            raise KeyboardInterrupt
        return {"setting": setting.name, "missing": "a test"}

    with pytest.raises(KeyboardInterrupt):
        measure_all(types.SimpleNamespace(measure=measure), [Setting(64, rows) for rows in (1, 2, 3)], results)
    assert [one["missing"] for one in written[0]] == ["a test", "not reached", "not reached"]
    table = (tmp_path / "new" / "gpu.md").read_text(encoding="utf-8")
    assert "| 1 x 64, checkpointing on, sdpa | a test |" in table and table.count("not reached") == 2


@pytest.mark.slow
def test_the_results_say_which_model_was_measured(tmp_path):
    import gpu
    from gpu_model import QWEN_7B, TINY
    from gpu_results import Results

    for shape, dtype, said in (
        (TINY, "torch.float32", "The tiny shape (2 layers, 128 wide, vocabulary 2,048), random weights, NF4"),
        (QWEN_7B, "torch.bfloat16", "Qwen2.5-7B's shape (28 layers, 3584 wide, vocabulary 152,064), random weights"),
    ):
        Results(tmp_path, "cpu", dtype, shape, {}).write()
        kept = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
        assert (kept["tiny"], kept["shape"], kept["dtype"]) == (shape == TINY, shape, dtype)
        table = (tmp_path / "gpu.md").read_text(encoding="utf-8")
        assert said in table and f"r=16, {dtype}. " in table and "--tiny" not in table
        assert gpu.holds_real_results(tmp_path) == (shape == QWEN_7B)


@pytest.mark.slow
def test_weights_are_let_go_one_after_another_as_they_are_quantised(monkeypatch):
    import bitsandbytes as bnb
    import torch

    from gpu_model import TINY, build_base, quantize

    base, left = build_base(TINY, "cpu", torch.float32), []
    layers = [weakref.ref(one) for one in base.model.modules() if type(one) is torch.nn.Linear]

    class Counting(bnb.nn.Linear4bit):
        def __init__(self, *given, **named):
            left.append(sum(layer() is not None for layer in layers))
            super().__init__(*given, **named)

    monkeypatch.setattr(bnb.nn, "Linear4bit", Counting)
    quantize(base, "cpu", torch.float32)
    assert left == list(range(14, 0, -1))


@pytest.fixture(scope="module")
def bench():
    import torch

    from gpu_bench import Bench
    from gpu_model import TINY

    return Bench(TINY, "cpu", torch.float32, float("inf"))


@pytest.fixture
def small():
    from gpu_settings import Setting

    return Setting(16, 2, checkpointing=False)


@pytest.mark.slow
def test_a_setting_leaves_the_model_as_it_was(bench, small):
    from dataclasses import replace

    before = {name: weight.clone() for name, weight in bench.model.named_parameters() if weight.requires_grad}
    found = [bench.measure(one) for one in (small, replace(small, checkpointing=True), replace(small, micro_batches=2))]
    assert all(bench.model.get_parameter(name).equal(weight) for name, weight in before.items())
    assert not bench.model.get_input_embeddings()._forward_hooks, "of checkpointing, which each turn would add to"
    assert all(one["gradient_norm"] == found[0]["gradient_norm"] and "differs" not in one for one in found)


@pytest.mark.slow
def test_a_setting_that_computes_something_else_is_seen_on_its_first_step(bench, small, monkeypatch):
    import torch

    bench.measure(small)
    attention = torch.nn.functional.scaled_dot_product_attention

    def all_in_view(*given, **named):
        return attention(*given, **{**named, "is_causal": False})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", all_in_view)
    assert bench.measure(small)["differs"].startswith("computes something else: loss 7.")


@pytest.mark.slow
@pytest.mark.parametrize("error", [AttributeError, AssertionError, KeyError])
def test_an_error_costs_one_setting_on_a_gpu_and_ends_a_tiny_run(bench, small, monkeypatch, error):
    def fail(_setting):
        raise error("of a kernel")

    monkeypatch.setattr(bench, "_run", fail)
    with pytest.raises(error):
        bench.measure(small)
    monkeypatch.setattr(bench, "on_gpu", True)
    assert bench.measure(small)["missing"].startswith(f"{error.__name__}: ")


@pytest.mark.slow
@pytest.mark.long
def test_liger_is_gone_from_the_settings_after_it_also_where_it_failed(bench, small, monkeypatch):
    from dataclasses import replace

    from transformers.models.qwen2 import modeling_qwen2

    class Liger(types.ModuleType):
        def apply_liger_kernel_to_qwen2(self, model, fused_linear_cross_entropy):
            modeling_qwen2.apply_rotary_pos_emb = lambda query, key, *_: (query, key)
            model.model.norm.forward = lambda hidden: hidden + 0
            if self.fails:
                raise ValueError("another transformers")

    liger, plain = Liger("liger_kernel.transformers"), bench.measure(small)
    liger.fails = False
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr("gpu_bench.missing_for", lambda _setting: None)
    assert "differs" in bench.measure(replace(small, liger=True))
    assert bench.measure(small)["gradient_norm"] == plain["gradient_norm"]
    liger.fails = True
    for _ in range(2):
        with pytest.raises(ValueError, match="another transformers"):
            bench.measure(replace(small, liger=True))
    assert bench.measure(small)["gradient_norm"] == plain["gradient_norm"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's, of itself
@pytest.mark.long
def test_a_compiled_setting_is_compiled_or_says_why_not(bench, small, monkeypatch):
    import time
    from dataclasses import replace

    import torch

    compiled = bench.measure(replace(small, checkpointing=True, compiled=True))
    assert (compiled["graphs"], compiled["graph_breaks"]) == (1, 0) and "differs" not in compiled
    # Without checkpointing the first layer is one graph and the others another: their input has a gradient.
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(Exception, match="recompile_limit"):
        bench.measure(replace(small, compiled=True))
    monkeypatch.setattr(bench, "deadline", time.monotonic() + 60)
    assert bench.measure(replace(small, compiled=True))["missing"] == "no time left"
    assert "seconds" in bench.measure(small), "and nothing else waits for that much time"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_gradient_that_is_off_by_a_percent_or_no_number_ends_it(factor, monkeypatch):
    import torch

    import gpu_checks

    def off(model, head_loss, micro_batch, device, dtype):
        loss = mean_loss(model, head_loss, micro_batch, device, dtype)
        # The loss itself stays as it is; its gradient has the factor.
        return loss if dtype == torch.float32 else loss * factor - (loss * (factor - 1)).detach()

    mean_loss = gpu_checks.mean_loss
    monkeypatch.setattr(gpu_checks, "mean_loss", off)
    with pytest.raises(SystemExit, match=r"does not compute what float32 does: .*mean_ratio_off"):
        gpu_checks.check_small_model("cpu")


@pytest.mark.slow
def test_a_loss_in_pieces_whose_gradient_is_scaled_by_8_bits_ends_it(monkeypatch):
    import gpu_checks
    from tunebook.training import head_loss

    def backward(ctx, of_loss, _of_right):
        (gradient,) = ctx.saved_tensors
        return gradient * (of_loss / head_loss.ROOM_BELOW).to(gradient.dtype), None, None, None

    monkeypatch.setattr(head_loss._LossWithGradient, "backward", staticmethod(backward))
    with pytest.raises(SystemExit, match="The loss in pieces is not that made at once: mean_ratio_off"):
        gpu_checks.check_small_model("cpu")


@pytest.mark.slow
@pytest.mark.long
def test_it_measures_a_tiny_model_on_the_cpu_and_names_what_is_missing(tmp_path):
    shown = typed("--tiny", "--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert "small NF4 model against float32: {'float32': {'loss_off': " in shown.stdout
    rows = [line.split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ") and " x " in line]
    measured = [row for row in rows if row[1].strip().replace(".", "").isdigit()]
    assert len(rows) == 15 and len(measured) >= 9, shown.stdout
    assert all(row[1].strip() for row in rows), "a figure, or what is missing"
    assert "computes something else" not in shown.stdout
    assert shown.stdout.strip().splitlines()[-1] in (tmp_path / "gpu.md").read_text(encoding="utf-8")
    kept = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert kept["tiny"] and kept["shape"]["hidden_size"] == 128
    kept = kept["measured"]
    assert sum("tokens_per_second" in one for one in kept) == len(measured)
