"""The main job as a user starts it: launchers, real processes, the run folder that comes out."""

import json
import re

import pytest

from checkout import SHARED, make_checkout, type_command

pytestmark = pytest.mark.slow

CPU = "accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2"
SUMMARY_FIELDS = {
    "status", "exit_code", "recipe", "recipe_sha256", "data_fingerprint", "model", "model_revision", "world_size",
    "device", "backend", "per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "learning_rate", "num_train_rows", "num_eval_rows", "num_quarantined_rows", "num_truncated_rows",
    "num_optimizer_steps", "trained_tokens", "processed_tokens", "padded_tokens", "first_loss", "final_loss",
    "eval_loss_before", "eval_loss", "tokens_per_second", "peak_memory_bytes", "wall_seconds", "adapter_dir",
    "adapter_sha256", "versions",
}  # fmt: skip


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Run what `make quickstart` runs, once, in a copy of the checkout; return the copy and the output."""
    checkout = make_checkout(tmp_path_factory.mktemp("checkout"))
    shown = type_command("make --no-print-directory -n -o install quickstart", checkout).stdout
    command = shown.replace("\\\n", " ").replace(".venv/bin/", "").strip().splitlines()[-1]
    assert "finetune.py recipes/tiny_qlora.yaml" in command
    return checkout, type_command(command, checkout)


def read_summary(checkout, stem="tiny_qlora"):
    return json.loads((checkout / "runs" / stem / "run_summary.json").read_text())


def test_quickstart_teaches_the_tiny_model_its_skill(quickstart):
    checkout, result = quickstart
    assert result.returncode == 0, result.stderr[-3000:]
    summary = read_summary(checkout)
    assert set(summary) >= SUMMARY_FIELDS
    assert (summary["status"], summary["exit_code"]) == ("completed", 0)
    assert (summary["world_size"], summary["backend"], summary["device"]) == (2, "gloo", "cpu")
    assert summary["exact_match_before"] <= 0.05 and summary["exact_match_after"] >= 0.95
    assert summary["num_exact_match_rows"] >= 100
    assert summary["eval_loss"] < summary["eval_loss_before"] / 2
    assert summary["processed_tokens"] > summary["padded_tokens"] >= 0
    assert {"torch", "transformers", "peft", "tunebook"} <= set(summary["versions"])


def test_quickstart_shows_what_was_learned_and_what_to_type_next(quickstart):
    _, result = quickstart
    output = result.stdout
    assert "2 processes on cpu, one group over gloo" in output
    assert "\r" not in output and "\x1b" not in output, "plain lines where there is no terminal"
    assert re.search(r"step \d+/\d+ .*loss \d", output) and " left" in output
    ending = output[output.rindex("held out") :]
    for part in ("loss", "exact matches", "before", "after", "runs/tiny_qlora/adapter", "next"):
        assert part in ending, part
    assert "Traceback" not in output + result.stderr
    for once in (
        "one group over gloo",
        "plan: 2 processes x 4 rows x 4 micro-steps = 32 rows per step",
        "data: 3,200 rows",
    ):
        assert output.count(once) == 1, "said once however many processes"


def test_run_folder_is_what_the_design_says(quickstart):
    checkout, _ = quickstart
    folder = checkout / "runs" / "tiny_qlora"
    names = {path.name for path in folder.iterdir()}
    assert {"tiny_qlora.yaml", "plan.json", "metrics.jsonl", "checkpoints", "adapter", "run_summary.json"} <= names
    adapter = {path.name for path in (folder / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "generation_config.json"} <= adapter
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in event for event in events) and any("eval_loss" in event for event in events)
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["num_optimizer_steps"] == read_summary(checkout)["num_optimizer_steps"]


def test_the_next_command_answers_words_that_no_row_holds(quickstart):
    checkout, result = quickstart
    command = re.search(r"next: +(.*)", result.stdout)[1]
    words = ["LOMIRA", "BEKUTO", "SAVINE", "ODARUP"]
    # The rows of the quickstart are single questions; asked in one conversation the tiny model is lost.
    questions = "".join(f"Write the word {word} backwards.\n/reset\n" for word in words)
    answered = type_command(f"printf {questions!r} | {command}", checkout)
    assert answered.returncode == 0, answered.stderr[-2000:]
    right = sum(word[::-1] == line for word, line in zip(words, answered.stdout.splitlines(), strict=True))
    assert right >= 3, answered.stdout


def test_the_same_command_again_trains_nothing_and_says_so(quickstart):
    checkout, _ = quickstart
    before = read_summary(checkout)
    result = type_command(f"{CPU} finetune.py recipes/tiny_qlora.yaml", checkout)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "--fresh" in result.stdout and read_summary(checkout) == before


@pytest.mark.long
def test_the_resolved_recipe_can_be_launched_as_it_is(quickstart):
    checkout, _ = quickstart
    words = "training.max_steps=2 training.num_train_epochs=null data.answer_rows=0"
    first = type_command(f"{CPU} finetune.py recipes/tiny_qlora.yaml {words} --run-dir runs/a", checkout)
    assert first.returncode == 0, first.stderr[-2000:]
    again = type_command(f"{CPU} finetune.py runs/a/tiny_qlora.yaml --run-dir runs/b", checkout)
    assert again.returncode == 0, again.stderr[-2000:]
    one, two = read_summary(checkout, "a"), read_summary(checkout, "b")
    assert one["recipe_sha256"] == two["recipe_sha256"] and one["adapter_sha256"] == two["adapter_sha256"]
    assert one["num_optimizer_steps"] == 2


FIVE_MISTAKES = """\
model: {name_or_path: assets/tiny-qwen2, dtype: float8}
lora: {rr: 4}
data: {path: data/nothing.jsonl}
training:
  learning_rte: 1e-4
  optim: adamw
"""
# Runs finetune.py as the launcher would, and notes the code that this rank ends with.
RANK = """\
import os, runpy, sys
from pathlib import Path
try:
    runpy.run_path("finetune.py", run_name="__main__")
    code = 0
except SystemExit as leaving:
    code = leaving.code
Path(f"code-{os.environ.get('RANK', '0')}").write_text(str(code))
sys.exit(code)
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc_per_node 2", CPU])
def test_five_mistakes_are_one_report_and_each_rank_ends_with_code_2(tmp_path, launcher):
    checkout = make_checkout(tmp_path)
    (checkout / "broken.yaml").write_text(FIVE_MISTAKES)
    (checkout / "rank.py").write_text(RANK)
    result = type_command(f"{launcher} rank.py broken.yaml", checkout)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert output.count("refused: 5 problems") == 1
    for key in ("model.dtype", "lora.rr", "data.path", "training.learning_rte", "training.optim"):
        assert output.count(f" {key}: ") == 1, key
    codes = [path.read_text() for path in sorted(checkout.glob("code-*"))]
    assert codes == ["2"] * (1 if launcher == "python" else 2)
    assert not (checkout / "runs").exists()


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared test data beside the checkout")
def test_4_bit_training_on_data_that_nobody_here_wrote(tmp_path):
    checkout = make_checkout(tmp_path)
    words = f"model.name_or_path={SHARED}/assets/stories260K data.path={SHARED}/data/alpaca_2000.json"
    words += " data.max_length=256 training.num_train_epochs=1 training.learning_rate=2e-3 data.answer_rows=0"
    result = type_command(f"{CPU} finetune.py recipes/tiny_qlora.yaml {words}", checkout)
    assert result.returncode == 0, result.stderr[-3000:]
    summary = read_summary(checkout)
    assert summary["eval_loss_before"] - summary["eval_loss"] >= 1.0
    assert summary["num_truncated_rows"] + summary["num_dropped_rows"] > 1000
