"""What a measurement passes through the model, on a stand-in for a run's bench."""

from types import SimpleNamespace

import pytest
import torch

from tunebook.plan.candidates import Candidate
from tunebook.plan.padding import Layout
from tunebook.training.probing import probe

pytestmark = pytest.mark.slow
FULLEST, USUAL = (3, 4, 5), (0, 1)


class Passes:
    """Stands in for a Bench, and notes the rows of each micro-batch that is passed through it."""

    def __init__(self):
        self.passed, self.device, self.model = [], "cpu", torch.nn.Linear(2, 2)
        self.model.is_activation_checkpointing = False

    def make(self, rows):
        return SimpleNamespace(rows=rows)

    def pass_through(self, micro_batch):
        self.passed.append(micro_batch.rows)


@pytest.mark.parametrize(("num_micro_batches", "times"), [(1, 1), (2, 2), (7, 2)])
def test_the_fullest_micro_batch_meets_the_gradients_of_another_where_a_step_has_several(num_micro_batches, times):
    layout = Layout(FULLEST, (3, 9), USUAL, 1.0, 27.0, num_micro_batches)
    bench = Passes()
    [found] = probe([Candidate(3, False, None, 0.0, layout)], bench, None)
    assert bench.passed.count(FULLEST) == times and bench.passed[times:].count(USUAL) == len(bench.passed) - times
    assert found.seconds > 0 and not found.ran_out
