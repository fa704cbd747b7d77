"""The world is read from pretended environments: what is accepted, GPUs, and worlds that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretended_worlds import TYPED, accelerate, elastic, only_refusal, read
from tunebook.errors import Refused
from tunebook.launching import world
from tunebook.launching.world import World, count_gpus, world_of


class TestAccepted:
    def test_plain_python_on_the_cpu(self):
        assert read({}) == World()

    def test_plain_python_on_one_gpu(self):
        seen = read({}, num_gpus=1)
        assert (seen.device, seen.backend, seen.launcher, seen.num_gpus) == ("cuda:0", None, "python", 1)

    def test_torchrun_on_the_cpu(self):
        seen = read(elastic(4, 3))
        assert seen == World(4, 3, 3, 4, "cpu", 0, "gloo", "torchrun")
        assert seen.device == "cpu"
        assert not seen.is_main

    def test_accelerate_on_gpus(self):
        seen = read(elastic(4, 1) | accelerate(), num_gpus=4)
        assert (seen.device, seen.backend, seen.launcher, seen.notes) == ("cuda:1", "nccl", "accelerate", ())

    def test_two_machines(self):
        second = elastic(8, 5, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1, GROUP_WORLD_SIZE=2)
        seen = read(second | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}, num_gpus=4)
        assert (seen.num_processes, seen.rank, seen.num_local_processes, seen.device) == (8, 5, 4, "cuda:1")

    def test_tunebook_launch(self):
        assert read(elastic(2) | {"TUNEBOOK_LAUNCH": "1"}).launcher == "tunebook"

    def test_one_process_has_no_group(self):
        assert read(elastic(1)).backend is None
        assert read(elastic(1), ddp_backend="nccl").backend is None

    def test_a_recipe_names_the_backend(self):
        assert read(elastic(2), num_gpus=2, ddp_backend="gloo").backend == "gloo"

    def test_variables_set_by_hand_without_a_local_size(self):
        by_hand = elastic(8, 5, LOCAL_RANK=1, LOCAL_WORLD_SIZE=None, GROUP_WORLD_SIZE=None, TORCHELASTIC_RUN_ID=None)
        assert read(by_hand, num_gpus=4).num_local_processes == 4
        assert read(by_hand).num_local_processes == 8

    def test_the_old_word_for_not_launched(self):
        assert read({"LOCAL_RANK": "-1", "RANK": "-1"}).num_processes == 1

    def test_a_slurm_batch_script_is_no_step(self):
        assert read({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}).num_processes == 1

    @pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
    def test_an_environment_that_says_what_the_recipe_says(self, dtype):
        says = elastic(2) | accelerate(ACCELERATE_MIXED_PRECISION="bf16")
        assert read(says, num_gpus=2, compute_dtype=dtype).device_type == "cuda"

    def test_cpu_is_honoured_beside_gpus(self):
        seen = read(accelerate(ACCELERATE_USE_CPU="True"), num_gpus=4, typed="accelerate launch --cpu")
        assert (seen.device, seen.num_processes, seen.num_gpus) == ("cpu", 1, 4)
        assert seen.notes == (
            "accelerate was started with --cpu or use_cpu: the run is on the CPU and the GPUs stay idle.",
        )


class TestGpus:
    def test_plain_python_with_several(self):
        line = only_refusal({}, num_gpus=4)
        assert "python started one process where 4 GPUs are visible" in line
        assert f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 {TYPED}" in line
        assert f"CUDA_VISIBLE_DEVICES=0 python {TYPED}" in line

    def test_one_process_of_accelerate_with_several(self):
        line = only_refusal(accelerate(), 2, "accelerate launch --num_processes 1")
        assert "accelerate launch started one process where 2 GPUs are visible" in line

    def test_more_processes_than_gpus(self):
        line = only_refusal(elastic(4, 1), num_gpus=2)
        assert "4 processes on this machine and 2 visible GPUs" in line
        assert "accelerate_configs/ddp.yaml --num_processes 2" in line
        assert "CUDA_VISIBLE_DEVICES= accelerate launch --config_file accelerate_configs/cpu.yaml" in line

    def test_one_gpu_and_two_processes(self):
        assert "2 processes on this machine and 1 visible GPU," in only_refusal(elastic(2), num_gpus=1)

    def test_a_local_rank_beyond_the_gpus(self):
        by_hand = elastic(8, 5, LOCAL_WORLD_SIZE=4, LOCAL_RANK=3)
        assert "4 processes on this machine and 2 visible GPUs" in only_refusal(by_hand, num_gpus=2)

    def test_some_gpus_left_idle(self):
        assert read(elastic(2), num_gpus=8).notes == ("2 of the 8 visible GPUs are used.",)

    def test_a_gpu_that_torch_cannot_use(self):
        (note,) = read({}, has_gpu_node=True).notes
        assert "torch cannot use" in note
        assert read({"CUDA_VISIBLE_DEVICES": ""}, has_gpu_node=True).notes == ()

    @pytest.mark.parametrize("hidden", ["", "-1", " -1,0"])
    def test_hidden_gpus_are_not_counted(self, hidden, monkeypatch):
        monkeypatch.setattr(world, "_has_gpu_node", lambda: True)
        monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
        assert count_gpus({"CUDA_VISIBLE_DEVICES": hidden}) == 0
        with pytest.raises(ImportError):
            count_gpus({"CUDA_VISIBLE_DEVICES": "0"})

    def test_no_device_node_means_no_gpu(self, monkeypatch):
        monkeypatch.setattr(world, "_has_gpu_node", lambda: False)
        monkeypatch.setitem(sys.modules, "torch", None)
        assert count_gpus({}) == 0


class TestWorldOf:
    def test_on_the_cpu(self):
        assert world_of(4) == World(4, 0, 0, 4, "cpu", 0, "gloo", "none")

    def test_on_gpus(self):
        assert world_of(4, "cuda") == World(4, 0, 0, 4, "cuda", 4, "nccl", "none")

    def test_one_process(self):
        assert world_of(1, "cuda").backend is None

    def test_refusals(self):
        with pytest.raises(Refused, match="at least 1 process, got 0"):
            world_of(0)
        with pytest.raises(Refused, match=r"training\.ddp_backend"):
            world_of(2, "cpu", "nccl")


def test_reading_imports_no_torch_where_no_gpu_can_be():
    code = "import sys; from tunebook.launching.world import read_world; print(read_world()); "
    code += "assert 'torch' not in sys.modules"
    environ = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "num_processes=1" in done.stdout


def test_accelerate_configs_are_topology_only():
    from ruamel.yaml import YAML

    folder = Path(__file__).parents[1] / "accelerate_configs"
    settings = {file.stem: YAML(typ="safe").load(file.read_text()) for file in folder.glob("*.yaml")}
    assert {"cpu", "single_gpu", "ddp"} <= set(settings)
    for name, given in settings.items():
        assert not {"mixed_precision", "fp16", "dynamo_config", "dynamo_backend"} & set(given), name
    assert settings["cpu"]["distributed_type"] == settings["ddp"]["distributed_type"] == "MULTI_GPU"
    assert settings["single_gpu"]["distributed_type"] == "NO"
    assert count_gpus({"CUDA_VISIBLE_DEVICES": settings["cpu"]["gpu_ids"]}) == 0
