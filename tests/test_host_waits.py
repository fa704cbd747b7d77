"""No micro-batch makes the host wait for the device: a GPU that is waited for runs dry before the next one is there.

On a CPU nothing waits, but what would is seen all the same: each operation that gives the host a value of a tensor.
"""

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_promises import watched
from tiny_training import build_base, build_data
from training_scenarios import run_of
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World

pytestmark = pytest.mark.slow
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
STEPS = 4
# The rows of a micro-batch become tensors there, on the CPU still.
BEFORE_THE_DEVICE = "batches.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, num_threads = tmp_path_factory.mktemp("waits"), torch.get_num_threads()
    torch.set_num_threads(1)
    build_base(folder / "base")
    start_process_group(World())
    yield folder
    stop_process_group()
    torch.set_num_threads(num_threads)


def waits_by_step(run, loop):
    """Train `run` and return the waits of each step, by place."""
    seen = [Counter()]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            if function._schema.name in WAITING:
                frames = traceback.extract_stack()[:-1]
                files = {Path(frame.filename).name for frame in frames}
                if BEFORE_THE_DEVICE not in files:
                    place = next(one for one in reversed(frames) if "torch" not in Path(one.filename).parts)
                    where = f"{Path(place.filename).name}:{place.lineno} {place.line}"
                    seen[-1][where] += 1
            return function(*arguments, **(named or {}))

    training = watched(run, loop, after_step=lambda model, step: seen.append(Counter()))
    with Watching():
        training.train()
    return seen[:STEPS]


@pytest.mark.parametrize("loop", ["trainer", "by hand"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_step_waits_no_more_often_for_more_micro_batches(folder, loop, packing):
    recipe = {"global_batch_size": 8, "num_train_epochs": 1, "validation": 0.0, "eval_strategy": "no"}
    recipe |= {"logging_steps": 10, "packing": packing}
    data = build_data(num_rows=8 * STEPS, num_eval_rows=0, num_examples=0)
    for micro_batch in (1, 4):
        run = run_of(folder, World(), "waits", data, **recipe, per_device_train_batch_size=micro_batch)
        micro_steps = run.plan.gradient_accumulation_steps
        assert micro_steps == 8 // micro_batch
        steps = waits_by_step(run, loop)
        # Step 1 makes the loader. It is logged after its end, which is what the look at step 2 begins with.
        assert 2 <= steps[1].total() <= 3, f"what reads loss and gradient norm for the log is seen: {steps[1]}"
        assert not steps[2] and not steps[3], "with no log due, nothing waits in the whole step"
