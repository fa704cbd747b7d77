"""Under each launcher N processes are one gloo group, which the Trainer keeps, and they refuse together."""

import json
import sys
from pathlib import Path

import pytest

from launched_ranks import clean_environ, launch_in_process, run

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# One rank of a group: everything it found goes into <folder>/<rank>.json.
GROUP_SCRIPT = """
import json, os, sys
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.launching.process_group import refuse_together, start_process_group, stop_process_group
from tunebook.launching.world import read_world

folder, with_trainer = Path(sys.argv[1]), "trainer" in sys.argv[2:]
world = read_world()
start_process_group(world, timeout_seconds=77)
import torch
import torch.distributed as dist

def timeout():
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

sum_of_ranks = torch.tensor(float(world.rank))
dist.all_reduce(sum_of_ranks)
facts = {
    "world": [world.num_processes, world.rank, world.num_local_processes, world.device, world.backend, world.launcher],
    "notes": world.notes,
    "group": [dist.get_world_size(), dist.get_rank(), dist.get_backend(), timeout()],
    "sum": sum_of_ranks.item(),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
}
try:
    with refuse_together():
        problems = [Problem("everywhere", where="r.yaml:1")] + [Problem("only on 1", where="d.jsonl:3")] * world.rank
        raise Refused(problems)
except Refused as refused:
    facts["agreed"] = refused.render()
with refuse_together():
    facts["went on"] = True

if with_trainer:
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, labels):
            return {"loss": ((self.weight * x - labels) ** 2).mean()}

    arguments = TrainingArguments(
        output_dir=str(folder / "out"), accelerator_config={"use_configured_state": True}, use_cpu=True, max_steps=2,
        ddp_timeout=1800, ddp_find_unused_parameters=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )
    rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(32)]
    trainer = Trainer(Line(), arguments, train_dataset=rows)
    trainer.train()
    facts["trainer"] = {
        "processes": [arguments.world_size, trainer.accelerator.num_processes],
        "device": [arguments.device.type, trainer.accelerator.device.type, arguments.n_gpu],
        "kind": trainer.accelerator.distributed_type.value,
        "wrapped": type(trainer.model_wrapped).__name__,
        "timeout": timeout(),
        "weight": trainer.model.weight.item(),
    }
stop_process_group()
stop_process_group()
facts["group is left"] = not dist.is_initialized()
(folder / f"{world.rank}.json").write_text(json.dumps(facts))
"""

# One process, several worlds that accelerate does not see as the launcher made them.
DISAGREEMENT_SCRIPT = """
import json, os, sys
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.launching.process_group import agree_on_refusal, process_group, start_process_group, stop_process_group
from tunebook.launching.world import World, read_world

facts = {}
def refusal(world, **variables):
    os.environ.update(variables)
    try:
        start_process_group(world, timeout_seconds=1)
    except Refused as refused:
        return refused.render()
    finally:
        stop_process_group()
        for name in variables:
            del os.environ[name]

stop_process_group()
agree_on_refusal(None)
facts["torch is not needed"] = "torch" not in sys.modules
launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
os.environ.update(launched)
start_process_group(read_world())
import torch
from accelerate import PartialState
facts["one"] = [PartialState().distributed_type.value, torch.distributed.is_initialized(), os.environ["RANK"]]
stop_process_group()
for leave in (ValueError("broken"), SystemExit(75), Refused(Problem("a is wrong"))):
    try:
        with process_group(World()):
            facts["inside"] = PartialState().num_processes
            raise leave
    except BaseException as left:
        assert left is leave
        facts[f"left after {type(left).__name__}"] = PartialState._shared_state == {}
with process_group(World()):
    pass
facts["left in order"] = PartialState._shared_state == {}
for name in launched:
    del os.environ[name]
PartialState(cpu=True)
facts["already made"] = refusal(World(num_processes=2, backend="gloo"))
facts["other device"] = refusal(World(), ACCELERATE_TORCH_DEVICE="meta")
facts["nobody there"] = refusal(
    World(2, 1, 1, 2, backend="gloo"), RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
    MASTER_ADDR="127.0.0.1", MASTER_PORT="9", OMP_NUM_THREADS="1",
)
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
facts["rank absent"] = refusal(
    World(2, 0, 0, 2, backend="gloo"), RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
)
Path(sys.argv[1]).write_text(json.dumps(facts))
"""


def write(folder, text):
    file = folder / "script.py"
    file.write_text(text)
    return file


def facts_of_two(folder, launcher, **expected):
    """Read what both ranks wrote and assert that they were one group of two over gloo."""
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, facts in enumerate(both):
        assert facts["world"] == [2, rank, 2, "cpu", "gloo", launcher]
        assert facts["group"] == [2, rank, "gloo", 77.0]
        assert facts["sum"] == 1.0
        assert facts["notes"] == []
        assert facts["agreed"] == "refused: 2 problems\n  r.yaml:1: everywhere\n  rank 1: d.jsonl:3: only on 1"
        assert facts["went on"]
        assert facts["group is left"]
        assert expected.items() <= facts.items()
    return both


@pytest.mark.slow
def test_accelerate_launch_and_the_trainer_keep_one_group(tmp_path):
    """Holds what TrainingArguments must be given for the Trainer to keep the group, the device and the timeout."""
    config = ROOT / "accelerate_configs" / "cpu.yaml"
    command = [BIN / "accelerate", "launch", "--config_file", config, "--num_processes", 2]
    script = write(tmp_path, GROUP_SCRIPT)
    run([*command, script, tmp_path, "trainer"], clean_environ())
    both = facts_of_two(tmp_path, "accelerate", gpus="-1,-1")
    for facts in both:
        trained = facts["trainer"]
        assert trained["processes"] == [2, 2]
        assert trained["device"] == ["cpu", "cpu", 0]
        assert trained["kind"] == "MULTI_CPU"
        assert trained["wrapped"] == "DistributedDataParallel"
        assert trained["timeout"] == 77.0
    assert both[0]["trainer"]["weight"] == both[1]["trainer"]["weight"] != 1.0


@pytest.mark.slow
def test_torchrun(tmp_path):
    script = write(tmp_path, GROUP_SCRIPT)
    run([BIN / "torchrun", "--nproc_per_node", 2, script, tmp_path], clean_environ())
    facts_of_two(tmp_path, "torchrun", threads="1")


@pytest.mark.slow
def test_accelerate_started_one_process_although_two_were_asked_for(tmp_path):
    """Case P13: what accelerate leaves in the environment and on its command line is enough for the note."""
    text = "from tunebook.launching.world import read_world\nworld = read_world()\n"
    text += "print(world.num_processes, *world.notes)\n"
    script = write(tmp_path, text)
    done = run(
        [BIN / "accelerate", "launch", "--cpu", "--num_processes", 2, script, "--num_processes", 9], clean_environ()
    )
    assert done.stdout.startswith("1 1 process runs although 2 were asked for:")
    assert f"accelerate_configs/cpu.yaml --num_processes 2 {script} --num_processes 9\n" in done.stdout


@pytest.mark.slow
def test_accelerate_has_what_the_configs_and_the_notes_rely_on():
    """The commands that refusals and notes name are accepted: read as accelerate reads them, without starting."""
    code = """
import sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
for stem, wanted in (("cpu", 3), ("ddp", 4), ("single_gpu", None), ("multi_node", 8), ("fsdp2", 4)):
    words = ["--config_file", f"{sys.argv[1]}/{stem}.yaml"] + (["--num_processes", str(wanted)] if wanted else [])
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "finetune.py"]))
    print(stem, arguments.multi_gpu, arguments.num_processes, arguments.mixed_precision, arguments.gpu_ids)
"""
    done = run([sys.executable, "-c", code, ROOT / "accelerate_configs"], clean_environ())
    assert done.stdout.splitlines() == [
        "cpu True 3 no -1,-1",
        "ddp True 4 no all",
        "single_gpu False 1 no 0",
        "multi_node True 8 no all",
        "fsdp2 False 4 no all",
    ]


@pytest.mark.slow
def test_a_world_that_accelerate_does_not_see_is_refused(tmp_path):
    run([sys.executable, write(tmp_path, DISAGREEMENT_SCRIPT), tmp_path / "facts.json"], clean_environ())
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["torch is not needed"]
    assert facts["one"] == ["NO", False, "0"]  # no group of one, and torchrun's variables stay
    assert facts["inside"] == 1
    assert facts["left after ValueError"] and facts["left after SystemExit"] and facts["left after Refused"]
    assert facts["left in order"]
    assert "processes 1 instead of 2" in facts["already made"]
    assert "device meta instead of cpu" in facts["other device"]
    assert "ACCELERATE_TORCH_DEVICE" in facts["other device"]
    assert "no group of 2 processes formed over gloo at 127.0.0.1:9 (rank 0, which meets" in facts["nobody there"]
    assert "(rank 1 did not come within 1 s)" in facts["rank absent"]


@pytest.mark.slow
def test_launch_makes_one_group(tmp_path):
    script = write(tmp_path, GROUP_SCRIPT)
    launch_in_process(tmp_path, [(script.name, [""], 2)], clean_environ())
    facts_of_two(tmp_path, "tunebook", threads="1")
