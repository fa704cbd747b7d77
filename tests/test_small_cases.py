"""Cases of loss, small data and evaluation that other tools got wrong, in one process (tests/cases)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkout import ROOT
from tiny_data import CASES, write_jsonl
from tiny_models import build_tiny_model
from tiny_training import TinyData, build_base, build_data, build_recipe, plan_of
from training_scenarios import one_by_one, run_of
from tunebook.errors import Refused
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World
from tunebook.plan.planning import plan_with_data, plan_without_data
from tunebook.recipe.reading import load_recipe

pytestmark = pytest.mark.slow

SGD = ("training.optim=sgd", "training.learning_rate=0.05", "training.lr_scheduler_type=constant")
SGD += ("training.max_grad_norm=0", "training.num_train_epochs=1", "training.logging_steps=1")


@pytest.fixture(scope="module", autouse=True)
def single_process():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start_process_group(World())
    yield
    stop_process_group()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=64)


@pytest.fixture
def run_case(tiny, tmp_path, monkeypatch):
    """Train a case's data by a recipe with these overrides; return the run, its losses and its adapter."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def run(data, *overrides):
        from accelerate.state import AcceleratorState

        from tunebook.data.prepare import prepare_data
        from tunebook.data.tokenizer import load_tokenizer
        from tunebook.training.ready import build_run
        from tunebook.training.run import train

        AcceleratorState._reset_state()
        recipe_file = tmp_path / "case.yaml"
        recipe_file.write_text(
            f"model: {{name_or_path: {tiny}, dtype: float32}}\nlora: {{r: 4, lora_alpha: 4}}\n"
            f"data: {{path: {data}, max_length: 512, answer_rows: 0}}\n"
            "training: {per_device_train_batch_size: 4, save_strategy: 'no', seed: 0}\n"
        )
        recipe = load_recipe(str(recipe_file), overrides)
        plan = plan_without_data(recipe, World(), str(tmp_path / f"run{len(list(tmp_path.glob('run*')))}"))
        tokenizer = load_tokenizer(recipe.model.name_or_path, None)
        prepared = prepare_data(recipe, tokenizer)
        plan = plan_with_data(plan, prepared, World())
        built = build_run(recipe, plan, World(), tokenizer, prepared)
        first = one_by_one(built.model, prepared.train.select(next(built.batches.rows_of_steps())))
        result = train(built)
        events = map(json.loads, (tmp_path / plan.run_dir / "metrics.jsonl").read_text().splitlines())
        losses = [event["loss"] for event in events if "loss" in event]
        return plan, first, losses, load_file(f"{plan.adapter_dir}/adapter_model.safetensors"), result

    return run


@pytest.mark.parametrize(("case", "num_steps"), [("L01", 1), ("L03", 2)])
def test_accumulation_weighs_tokens_and_a_short_last_window_counts_by_its_own(run_case, case, num_steps):
    whole = run_case(CASES / case / "data.jsonl", *SGD)
    small = ("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4")
    parts = run_case(CASES / case / "data.jsonl", *SGD, *small)
    assert len(whole[2]) == len(parts[2]) == num_steps
    assert whole[2] == pytest.approx(parts[2], abs=1e-5)
    assert whole[2][0] == pytest.approx(whole[1], abs=1e-5), "the token mean computed outside the product"
    assert max(float((whole[3][name] - parts[3][name]).abs().max()) for name in whole[3]) < 1e-6
    assert any(one.abs().max() > 0 for name, one in whole[3].items() if "lora_B" in name)


def test_one_row_is_one_step_per_epoch_and_said_and_drop_last_refuses(run_case, capsys):
    words = ("training.per_device_train_batch_size=8", "training.gradient_accumulation_steps=4")
    plan, _, losses, _, result = run_case(CASES / "S01" / "data.jsonl", *words, "training.num_train_epochs=2")
    assert plan.num_optimizer_steps == result.summary.num_optimizer_steps == 2 and losses
    assert "note: 1 training row does not fill the global batch of 32" in capsys.readouterr().out
    with pytest.raises(Refused, match=r"3 training rows < global batch of 4"):
        run_case(CASES / "S01" / "data3.jsonl", "training.dataloader_drop_last=true")


def test_rows_whose_answer_is_a_single_token_train(run_case, tmp_path):
    rows = [{"instruction": "Say it.", "output": letter} for letter in "abcdef"]
    *_, losses, adapter, result = run_case(write_jsonl(tmp_path / "rows.jsonl", rows), "training.num_train_epochs=1")
    assert len(losses) >= 1 and result.summary.trained_tokens == 12, "the letter and the stop of each row"
    assert all(torch.isfinite(one).all() for one in adapter.values())


def test_evaluation_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    """Logits of 200 rows of 64 tokens over 32,000 entries would be 1.6 GB; naive metrics keep them."""
    monkeypatch.syspath_prepend(str(ROOT))
    import train_ddp

    from tunebook.training.measuring import PeakMemory
    from tunebook.training.run import build_trainer

    build_base(tmp_path / "base", vocab_size=32000)
    for loop in (lambda run: build_trainer(run, None), lambda run: train_ddp.Loop(run, None)):
        peaks = []
        for num_rows in (20, 200):
            data = build_data(num_eval_rows=num_rows, num_examples=0)
            run = run_of(tmp_path, World(), "memory", data, per_device_eval_batch_size=4)
            memory = PeakMemory("cpu")
            assert loop(run).held_out_loss() > 0
            peaks.append(memory.stop())
        assert peaks[1] - peaks[0] < 200e6


def right_tokens(model, rows):
    """Return how many labels are the model's first choice, and how many there are, from one forward per row."""
    right = number = 0
    for row in rows:
        with torch.no_grad():
            choices = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(dim=-1).tolist()
        pairs = [pair for pair in zip(choices[:-1], row["labels"][1:], strict=True) if pair[1] != -100]
        right, number = right + sum(choice == label for choice, label in pairs), number + len(pairs)
    return right, number


def test_token_accuracy_is_of_the_labels_alone_and_1_once_the_rows_are_learned(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import train_ddp

    from tunebook.training.run import build_trainer, train

    build_base(tmp_path / "base")
    rows = build_data(num_rows=4, num_examples=0).train
    recipe = {"global_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 300}
    run = run_of(tmp_path, World(), "learned", TinyData(rows, rows, ()), num_train_epochs=300, **recipe)
    trainer, loop = build_trainer(run, None), train_ddp.Loop(run, None)
    right, number = right_tokens(run.model, rows)
    assert 0 < number == sum(label != -100 for row in rows for label in row["labels"])
    assert trainer.evaluate()["eval_token_accuracy"] == right / number < 0.5
    loop.held_out_loss()
    assert loop.state.log_history[-1]["eval_token_accuracy"] == right / number
    summary = train(run).summary
    assert summary.eval_token_accuracy == right_tokens(run.model, rows)[0] / number > 0.99


def test_a_section_without_values_is_compared_between_ranks():
    from tunebook.training.ready import start_facts

    recipe, data = build_recipe("org/tiny", lora={}), build_data()
    facts = start_facts(recipe, plan_of(recipe, World(), data, "runs/tiny"), data)
    assert facts["lora"] == {} and facts["training.learning_rate"] == 1e-3
