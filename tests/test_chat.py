"""Asking the model of a finished run."""

from pathlib import Path

import pytest

from tunebook.chat import chat
from tunebook.finished import Finished
from tunebook.trained import load_trained


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"r": 4}, None], ids=["adapter", "whole model"])
def test_the_model_that_answers_is_the_trained_one(tmp_path, capsys, monkeypatch, lora):
    import training_scenarios
    from tiny_training import build_base, build_data
    from tunebook.adapter import adapter_tensors, tensor_sha256
    from tunebook.process_group import process_group
    from tunebook.training.run import train
    from tunebook.world import World

    build_base(tmp_path / "base")
    with process_group(World()):
        run = training_scenarios.run_of(tmp_path, World(), "run", build_data(num_examples=2), max_steps=2, lora=lora)
        result = train(run)
    finished = Finished(Path(run.plan.run_dir), run.recipe, {}, run.plan)
    trained = load_trained(finished)
    assert tensor_sha256(adapter_tensors(trained.model)) == result.summary.adapter_sha256
    monkeypatch.setattr("tunebook.chat.open_finished", lambda run_dir: finished)
    monkeypatch.setattr("tunebook.chat.MAX_NEW_TOKENS", 5)
    chat(run.plan.run_dir, ["Hello", "Hello again", "", "never asked"])
    assert capsys.readouterr().out.count("\n") >= 2
