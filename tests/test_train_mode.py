"""A compiled model trains with dropout on in each micro-batch: after an evaluation, and after going on."""

from pathlib import Path

import pytest
import torch

from tiny_training import LORA, build_data
from training_scenarios import compiling_alone, run_of
from tunebook.launching.world import World
from tunebook.model.adapter import adapter_tensors
from tunebook.runs.checkpoints import check_whole
from tunebook.training.run import build_trainer

pytestmark = [pytest.mark.slow, pytest.mark.long]
# An evaluation and a checkpoint after each of two steps of one micro-batch; `eager` leaves out what a compiler would
# take longest for. A LoRA B that is not zero, so that dropout shows from the first step on.
RECIPE = {
    "torch_compile_backend": "eager",
    "lora": {**LORA, "lora_dropout": 0.5, "init_lora_weights": False},
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


@pytest.fixture
def folder(tmp_path):
    with compiling_alone(tmp_path):
        yield tmp_path


@pytest.fixture
def build_watched(folder, monkeypatch):
    """Build a trainer, and a list of what is found in each micro-batch: all in train mode, another loss each time."""

    def build():
        trainer = build_trainer(run_of(folder, World(), "run", build_data(num_rows=16, num_examples=0), **RECIPE), None)
        plain, found = trainer.compute_loss, []

        def compute_loss(model, inputs, **named):
            assert hasattr(model, "_orig_mod"), "it is compiled"
            losses = set()
            for seed in (1, 2):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    losses.add(float(plain(model, dict(inputs), **named).detach()))
            found.append((all(module.training for module in trainer.model.modules()), len(losses)))
            return plain(model, inputs, **named)

        monkeypatch.setattr(trainer, "compute_loss", compute_loss)
        return trainer, found

    return build


def test_a_compiled_model_is_in_train_mode_after_an_evaluation_and_after_going_on(build_watched):
    whole, found = build_watched()
    whole.evaluate()  # as before step 1 of each run
    whole.train_on(None)
    assert found == [(True, 2)] * 2
    again, found = build_watched()
    checkpoint = check_whole(Path(whole.args.output_dir) / "checkpoint-1")
    again.go_on_from(checkpoint)
    again.train_on(checkpoint)
    assert again.state.global_step == 2 and found == [(True, 2)]
    expected, tensors = adapter_tensors(whole.model), adapter_tensors(again.model)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected), "the dropout of the unbroken run"
