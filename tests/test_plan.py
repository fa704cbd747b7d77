"""The plan: batch arithmetic exact or refused, rates, precision, and the command that prints it."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunebook.errors import Refused
from tunebook.launching.command_line import read_command
from tunebook.launching.world import World, world_of
from tunebook.model.shapes import build_shape, count_lora_parameters, find_shape
from tunebook.plan.plan import build_plan, with_rows
from tunebook.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def plan_of(tmp_path):
    def build(
        num_processes: int = 1, device: str = "cpu", sections: str = "", gpu_has_bf16: bool = True, **training: object
    ):
        lines = "".join(f"  {name}: {value}\n" for name, value in training.items())
        text = "model: {name_or_path: a/b}\ndata: {path: a/b}\nlora: {}\n"
        path = tmp_path / "case.yaml"
        path.write_text((sections or text) + (f"training:\n{lines}" if lines else ""))
        return build_plan(load_recipe(str(path)), world_of(num_processes, device), bf16_supported=gpu_has_bf16)

    return build


def refusal(build, *args, **kwargs) -> str:
    with pytest.raises(Refused) as refused:
        build(*args, **kwargs)
    return str(refused.value)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_global_batch_is_the_same_in_every_world(plan_of, processes, accumulation):
    plan = plan_of(processes, global_batch_size=64, per_device_train_batch_size=8)
    assert (plan.global_batch_size, plan.gradient_accumulation_steps) == (64, accumulation)
    assert plan.origins["gradient_accumulation_steps"].startswith("64 / (")


@pytest.mark.parametrize("whole", [1, 6, 7, 12, 32, 60, 97, 128])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8])
def test_derived_arithmetic_is_exact_or_refused(plan_of, whole, processes):
    try:
        plan = plan_of(processes, global_batch_size=whole)
    except Refused:
        assert whole % processes
        return
    factors = plan.per_device_train_batch_size, plan.gradient_accumulation_steps
    assert processes * factors[0] * factors[1] == whole and factors[0] <= 8


def test_a_batch_that_cannot_be_split_shows_numbers_and_ways_out(plan_of):
    message = refusal(plan_of, 3, global_batch_size=64, per_device_train_batch_size=8)
    for part in ("64 rows", "3 processes x 8 rows", "global_batch_size=48", "2 or 4 processes", "case.yaml"):
        assert part in message


def test_a_huge_batch_that_cannot_be_split_answers_at_once(plan_of):
    started = time.monotonic()
    message = refusal(plan_of, 2, global_batch_size=16777213, per_device_train_batch_size=1)
    assert "1 process" in message and time.monotonic() - started < 1
    assert "Use 1" in refusal(plan_of, 1, global_batch_size=16777213, per_device_train_batch_size=9999)


def test_the_classic_pair_grows_with_the_world(plan_of):
    plan = plan_of(4, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert plan.global_batch_size == 24
    assert plan.origins["global_batch_size"] == "4 processes x 2 rows x 3 micro-steps"
    assert plan_of(1).global_batch_size == 8


@pytest.mark.parametrize(("kind", "rate"), [("none", 3e-4), ("linear", 1.2e-3), ("sqrt", 6e-4)])
def test_learning_rate_scaling(plan_of, kind, rate):
    plan = plan_of(4, learning_rate=3e-4, learning_rate_scaling=kind)
    assert plan.learning_rate == pytest.approx(rate, rel=1e-12)
    assert ("4 / 1" in plan.origins["learning_rate"]) == (kind != "none")
    assert plan_of(1, learning_rate=3e-4, learning_rate_scaling=kind).learning_rate == pytest.approx(3e-4)


def test_learning_rate_scaling_from_another_base(plan_of):
    plan = plan_of(2, learning_rate=1e-3, learning_rate_scaling="linear", learning_rate_base_processes=8)
    assert plan.learning_rate == pytest.approx(2.5e-4)


def test_rows_give_steps(plan_of):
    plan = with_rows(plan_of(1, per_device_train_batch_size=4, num_train_epochs=3), 52002, 0.0, "--rows")
    assert (plan.num_train_rows, plan.steps_per_epoch, plan.num_optimizer_steps) == (52002, 13001, 39003)
    plan = with_rows(plan_of(4, global_batch_size=64, num_train_epochs=0.5), 52002, 0.02, "--rows")
    assert (plan.num_train_rows, plan.num_eval_rows, plan.steps_per_epoch) == (50962, 1040, 797)
    assert plan.num_optimizer_steps == 399
    assert with_rows(plan_of(1, max_steps=7), 100, 0.0, "--rows").num_optimizer_steps == 7
    assert with_rows(plan_of(1), 1, 0.0, "--rows").steps_per_epoch == 1
    assert with_rows(plan_of(1, dataloader_drop_last="true"), 31, 0.0, "--rows").steps_per_epoch == 3


def test_unknown_rows_are_none(plan_of):
    plan = plan_of(1)
    assert plan.num_train_rows is plan.steps_per_epoch is plan.num_optimizer_steps is None


@pytest.mark.parametrize(
    ("device", "bf16", "dtype"), [("cpu", True, "float32"), ("cuda", True, "bfloat16"), ("cuda", False, "float32")]
)
def test_auto_precision_follows_the_device(plan_of, device, bf16, dtype):
    assert plan_of(1, device, gpu_has_bf16=bf16).compute_dtype == dtype


MODEL = "model: {{name_or_path: a/b, {}}}\ndata: {{path: a/b}}\nlora: {{}}\n"


@pytest.mark.parametrize(
    ("sections", "training", "key", "instead"),
    [
        ("", {"fp16": "true"}, "training.fp16", "float32"),
        (MODEL.format("dtype: float16"), {}, "model.dtype", "float32"),
        (MODEL.format("attn_implementation: flex_attention"), {}, "attn_implementation", "sdpa"),
        ("", {"tf32": "true"}, "training.tf32", "Remove"),
        ("", {"optim": "adamw_torch_npu_fused"}, "training.optim", "adamw_torch"),
    ],
)
def test_y13_what_a_cpu_lacks_is_refused_with_a_replacement(plan_of, sections, training, key, instead, monkeypatch):
    monkeypatch.setattr("tunebook.recipe.contradictions.find_spec", lambda name: object())
    message = refusal(plan_of, 1, "cpu", sections, **training)
    assert key in message and instead in message


def test_an_optimizer_that_trains_at_other_weights_is_refused(plan_of):
    message = refusal(plan_of, 1, "cpu", "", optim="schedule_free_adamw")
    assert "training.optim" in message and "adamw_torch" in message


def test_y13_flash_attention_is_refused_whether_installed_or_not(plan_of, monkeypatch):
    sections = MODEL.format("attn_implementation: flash_attention_2")
    for found in (None, object()):
        monkeypatch.setattr("tunebook.recipe.contradictions.find_spec", lambda name, found=found: found)
        message = refusal(plan_of, 1, "cpu", sections)
        assert "flash_attention_2" in message and "sdpa" in message


def test_y13_bf16_trains_on_a_cpu_with_a_note_and_is_refused_on_gpus_without_it(plan_of):
    plan = plan_of(1, bf16="true")
    assert plan.compute_dtype == "bfloat16" and any("slower" in note for note in plan.notes)
    assert "bf16" in refusal(plan_of, 1, "cuda", "", False, bf16="true")


def test_dropout_is_said_to_make_ranks_differ(plan_of):
    assert any(
        "dropout" in note
        for note in plan_of(
            2, sections=MODEL.replace("lora: {{}}", "lora: {{lora_dropout: 0.1}}").format("dtype: auto")
        ).notes
    )


def test_method_and_parameters(plan_of):
    text = "model: {name_or_path: Qwen/Qwen2.5-7B}\ndata: {path: a/b}\n"
    full, lora = plan_of(1, sections=text), plan_of(1, sections=text + "lora: {r: 16}\n")
    assert (full.method, full.trainable_parameters) == ("full fine-tune", 7615616512)
    assert (lora.method, lora.trainable_parameters) == ("LoRA", 40370176)
    eight = plan_of(1, sections=text + "lora: {}\nquantization: {load_in_8bit: true}\n")
    assert eight.method == "LoRA, 8-bit base"


# Published counts: 7.62 B and 0.494 B (Qwen2.5), 8.03 B and 1.24 B (Llama 3), 9.24 B (Gemma 2), 14.66 B (Phi-4).
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494032768),
        ("Qwen/Qwen2.5-7B-Instruct", 7615616512),
        ("Qwen/Qwen3-8B", 8190735360),
        ("meta-llama/Llama-3.1-8B", 8030261248),
        ("meta-llama/Llama-3.2-1B", 1235814400),
        ("mistralai/Mistral-7B-v0.3", 7248023552),
        ("google/gemma-2-9b", 9241705984),
        ("microsoft/phi-4", 14659507200),
    ],
)
def test_shapes_known_without_the_hub(model, parameters):
    shape = find_shape(model)
    assert shape is not None and shape.num_parameters == parameters


def test_a_model_never_seen_is_unknown():
    assert find_shape("nobody/nothing") is None
    assert build_shape({"model_type": "bert"}, "") is None


@pytest.mark.slow
def test_counted_parameters_are_those_of_the_model_itself():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunebook.system.quiet import quiet_libraries

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16, "pad_token_id": 0}
    biases = {"attention_bias": True}, {"mlp_bias": True}
    for kind in ("qwen2", "qwen3", "llama", "mistral", "gemma2", "phi3"):
        for more in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, *biases):
            config = AutoConfig.for_model(kind, **sizes, **more)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            # As published configs leave keys out that have their usual value, and as they name all of them.
            for written in ({**sizes, **more, "model_type": kind}, {**config.to_dict(), "model_type": kind}):
                shape = build_shape(written, "")
                assert shape is not None
                assert shape.num_parameters == model.num_parameters(), (kind, more)
            if more in biases:
                continue
            with quiet_libraries():
                adapted = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
            trainable = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
            assert count_lora_parameters(shape, {}, 3) == trainable, (kind, more)


# The command


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the story of finetune.py in this process, in the root of the checkout, and return what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))

    def run(*words: str) -> str:
        importlib.import_module("finetune").finetune(read_command(words))
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_plans(recipe):
    accepted = load_recipe(str(recipe.relative_to(ROOT)))
    for processes in (1, 2, 4, 8):
        plan = build_plan(accepted, world_of(processes, "cuda"))
        assert plan.global_batch_size == accepted.batch.global_batch_size
        assert plan.model_parameters and plan.trainable_parameters
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and ("GPU" in first or "CPU" in first), "the first comment names the hardware"


def test_plan_as_json_for_a_world_that_is_not_there(typed):
    words = ("recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "4", "--rows", "52002", "--json")
    plan = json.loads(typed(*words, "training.learning_rate=1e-4"))
    assert (plan["world_size"], plan["backend"], plan["gradient_accumulation_steps"]) == (4, "nccl", 2)
    assert (plan["num_optimizer_steps"], plan["num_eval_rows"]) == (2391, 1040)
    assert (plan["learning_rate"], plan["origins"]["learning_rate"]) == (1e-4, "command line")
    beside = {"origins", "notes", "choice", "data", "memory", "time", "findings", "unknown"}
    assert set(plan["origins"]) == set(plan) - beside


def test_hours_of_52002_rows_at_batch_4(typed):
    changes = ("training.global_batch_size=4", "training.per_device_train_batch_size=4", "data.validation=0")
    words = ("recipes/qwen7b_qlora.yaml", "--plan", "--rows", "52002", "--step-seconds", "0.8", *changes)
    plan = json.loads(typed(*words, "--json"))
    assert plan["steps_per_epoch"] == plan["time"]["steps_per_epoch"] == 13001
    assert (round(plan["time"]["epoch_hours"], 1), round(plan["time"]["hours"], 1)) == (2.9, 8.7)
    assert "13,001 steps and 2.9 h per epoch, 8.7 h in all" in typed(*words)


def test_whether_it_fits_a_gpu(typed):
    words = ("recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "1")
    assert "memory: fits in 24 GiB with checkpointing on; the largest micro-batch that does: 32" in typed(
        *words, "--gpu", "24"
    )
    small = typed(*words, "--gpu", "8")
    assert "does not fit in 8 GiB" in small and "warning: training.per_device_train_batch_size" in small
    memory = json.loads(typed(*words, "--gpu", "a100", "--json"))["memory"]
    assert memory["fits"] and memory["largest_rows"] == 64 and memory["gpu_bytes"] == 80 * 1024**3


def test_a_gpu_without_bfloat16_refuses_it(typed, capsys):
    words = ("recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "1", "--gpu", "t4")
    message = refusal(typed, *words)
    assert "--gpu t4 has no bfloat16" in message and "recipes/qwen7b_qlora.yaml:6: model.dtype" in message
    assert "memory of a process" in capsys.readouterr().out  # the plan comes first
    assert "has no bfloat16" not in typed(*words, "model.dtype=float16")


def test_plan_as_a_table_needs_neither_hub_nor_rows(typed):
    table = typed("recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "4")
    assert "4 processes x 8 rows x 2 micro-steps = 64 rows per step" in table
    assert "training rows" in table and "unknown" in table
    assert not (ROOT / "runs" / "qwen7b_qlora").exists()


def test_plan_counts_local_rows_and_refuses_unusable_ones(typed, tmp_path):
    rows = [{"instruction": "a", "output": "b"}] * 40
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "recipes/qwen7b_qlora.yaml",
        "--plan",
        "--json",
        f"data.path={tmp_path}/rows.jsonl",
        "data.validation=0.25",
    )
    plan = json.loads(typed(*words))
    assert (plan["num_train_rows"], plan["num_eval_rows"], plan["steps_per_epoch"]) == (30, 10, 1)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": 3}\n' * 40)
    message = refusal(typed, *words)
    assert "40 of 40 rows" in message and "rows.jsonl:1" in message


def test_a_plan_that_is_refused_ends_with_code_2_and_no_traceback():
    words = ("finetune.py", "recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "3")
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("refused: ") and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument"),
        (("recipes/qwen7b_qlora.yaml", "--plann"), "--plan"),
        (("recipes/qwen7b_qlora.yaml", "--rows", "3"), "Add --plan"),
        (("recipes/qwen7b_qlora.yaml", "--num-processes", "2"), "accelerate launch --num_processes"),
        (("recipes/qwen7b_qlora.yaml", "--plan", "--num-processes", "0"), "greater than or equal to 1"),
        (("recipes/qwen7b_qlora.yaml", "--plan", "--device", "cpu"), "--num-processes"),
        (("recipes/qwen7b_qlora.yaml", "--run-dir", ""), "--run-dir is empty"),
        (("recipes/qwen7b_qlora.yaml", "--gpu", "24"), "Add --plan"),
        (("recipes/qwen7b_qlora.yaml", "--plan", "--gpu", "big"), "a100"),
        (("recipes/qwen7b_qlora.yaml", "--plan", "--step-seconds", "0"), "no time"),
        (("recipes/qwen7b_qlora.yaml", "--plan", "--step-seconds", "nan"), "no time"),
        (("recipes/qwen7b_qlora.yaml", "recipes/tiny_qlora.yaml"), "one recipe"),
    ],
)
def test_a_command_line_that_is_wrong(typed, words, said):
    assert said in refusal(typed, *words)


def test_one_process_has_no_backend(plan_of):
    assert build_plan(load_recipe(str(ROOT / "recipes" / "qwen7b_qlora.yaml")), World()).backend is None
