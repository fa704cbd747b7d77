"""Every launch that would not form one group, or contradicts the recipe, is refused with the command to type."""

import pytest

from pretended_worlds import TYPED, accelerate, elastic, only_refusal, read, refusals


class TestNotOneGroup:
    @pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
    def test_a_missing_variable(self, name):
        line = only_refusal(elastic(2, **{name: None}))
        assert f"WORLD_SIZE is 2 but {name} is not set" in line
        assert f"accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2 {TYPED}" in line

    def test_world_size_alone(self):
        line = only_refusal({"WORLD_SIZE": "3"}, num_gpus=4)
        assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set" in line
        assert "accelerate_configs/ddp.yaml --num_processes 3" in line

    @pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
    def test_a_rank_without_a_world(self, name):
        assert f"{name} is set but WORLD_SIZE is not" in only_refusal({name: "1"})

    @pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
    @pytest.mark.parametrize("value", ["two", "1.5", "-3"])
    def test_no_whole_number(self, name, value):
        line = only_refusal(elastic(2, **{name: value}))
        assert line.startswith(f"{name}: got '{value}', a whole number is needed")
        assert f"unset {name}" in line

    def test_several_bad_numbers_are_all_named(self):
        assert len(refusals(elastic(2, RANK="x", LOCAL_RANK="y", WORLD_SIZE="z"))) == 3

    @pytest.mark.parametrize(
        ("changes", "start"),
        [
            ({"RANK": 2}, "RANK: got 2, allowed 0 to 1"),
            ({"LOCAL_RANK": 5}, "LOCAL_RANK: got 5, allowed 0 to 1"),
            ({"LOCAL_WORLD_SIZE": 0, "LOCAL_RANK": 1}, "LOCAL_RANK: got 1, allowed 0 to 0"),
            ({"LOCAL_WORLD_SIZE": 3}, "LOCAL_WORLD_SIZE: got 3, more than the WORLD_SIZE of 2"),
            ({"WORLD_SIZE": 0}, "WORLD_SIZE: got 0"),
            ({"MASTER_PORT": 99999}, "MASTER_PORT: got 99999, a port is a number from 1 to 65535"),
            ({"MASTER_PORT": 65536}, "MASTER_PORT: got 65536"),
            ({"MASTER_PORT": 0}, "MASTER_PORT: got 0"),
            ({"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 3}, "RANK: got 3, allowed 0 to 0"),
        ],
    )
    def test_numbers_out_of_range(self, changes, start):
        assert only_refusal(elastic(2, **changes)).startswith(start)

    def test_the_last_port_is_one_and_a_single_process_needs_none(self):
        assert read(elastic(2, MASTER_PORT=65535)).num_processes == 2
        assert read(elastic(1, MASTER_PORT=99999)).num_processes == 1

    @pytest.mark.parametrize(
        "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
    )
    def test_tasks_without_torch_variables(self, name):
        line = only_refusal({name: "2"})
        assert line.startswith(f"{name}: mpirun or srun started 2 tasks, and they would not form one group")
        assert f"--num_processes 2 {TYPED}" in line
        assert read({name: "1"}).num_processes == 1

    def test_an_older_slurm_step(self):
        assert only_refusal({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}).startswith("SLURM_NTASKS:")

    def test_a_launcher_in_each_task_that_knows_no_other(self):
        assert "2 tasks" in only_refusal(elastic(4, SLURM_STEP_NUM_TASKS=2), num_gpus=4)

    def test_tasks_that_set_torch_variables_themselves(self):
        by_hand = elastic(2, 1, GROUP_WORLD_SIZE=None, TORCHELASTIC_RUN_ID=None)
        assert read(by_hand | {"OMPI_COMM_WORLD_SIZE": "2"}).rank == 1

    @pytest.mark.parametrize("option", ["--num_machines 2", "--num-machines=2"])
    def test_machines_of_which_each_would_train_alone(self, option):
        line = only_refusal(accelerate(MASTER_PORT="29500"), 1, f"accelerate launch {option} --num_processes 2")
        assert "one process alone although it was asked for 2 machines" in line
        assert "--multi_gpu" in line


class TestContradictions:
    @pytest.mark.parametrize(
        ("stated", "dtype", "num_gpus"),
        [
            ("bf16", "float32", 2),
            ("bf16", "float16", 2),
            ("fp16", "bfloat16", 2),
            ("fp16", "auto", 2),
            ("bf16", "auto", 0),
            ("fp8", "bfloat16", 2),
            ("BF16", "float32", 0),
            ("half", "float16", 2),
        ],
    )
    def test_precision(self, stated, dtype, num_gpus):
        line = only_refusal(elastic(2, ACCELERATE_MIXED_PRECISION=stated), num_gpus, compute_dtype=dtype)
        assert line.startswith(f"ACCELERATE_MIXED_PRECISION: model.dtype: the environment says '{stated.lower()}'")
        assert "`unset ACCELERATE_MIXED_PRECISION`" in line

    def test_precision_given_as_an_option(self):
        says = elastic(2) | accelerate(ACCELERATE_MIXED_PRECISION="bf16")
        line = only_refusal(says, 2, "accelerate launch --mixed_precision bf16", compute_dtype="float32")
        assert "Leave --mixed_precision out of the launch, or set model.dtype=bfloat16" in line

    def test_precision_from_a_config_file(self, tmp_path):
        file = tmp_path / "mine.yaml"
        file.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n")
        says = elastic(2) | accelerate(ACCELERATE_MIXED_PRECISION="bf16")
        line = only_refusal(says, 2, f"accelerate launch --config_file={file}", compute_dtype="float32")
        assert f'Set mixed_precision: "no" in {file}' in line

    @pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
    @pytest.mark.parametrize("value", ["true", "1", "True"])
    def test_a_strategy_from_the_environment(self, name, value):
        line = only_refusal(elastic(2, **{f"ACCELERATE_USE_{name}": value}), num_gpus=2)
        assert line.startswith(f"ACCELERATE_USE_{name}: ")
        assert f"`unset ACCELERATE_USE_{name}`" in line
        assert read(elastic(2, **{f"ACCELERATE_USE_{name}": "false"}), num_gpus=2).num_processes == 2

    def test_a_strategy_from_accelerate(self):
        says = elastic(2) | accelerate(ACCELERATE_USE_FSDP="true")
        line = only_refusal(says, 2, "accelerate launch --use_fsdp --num_processes 2")
        assert "FSDP would not take effect" in line
        assert f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 {TYPED}" in line

    @pytest.mark.parametrize(("kind", "name"), [("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed")])
    def test_a_strategy_that_a_config_file_names_in_vain(self, kind, name, tmp_path):
        file = tmp_path / "sharded.yaml"
        file.write_text(f"distributed_type: {kind}\nnum_processes: 1\n")
        single = accelerate(ACCELERATE_USE_CPU="True")
        line = only_refusal(single, 0, f"accelerate launch --cpu --config_file {file}")
        assert line.startswith(f"{file}: {name} would not take effect")
        assert "accelerate_configs/cpu.yaml" in line

    def test_multi_gpu_on_the_command_line_wins_over_the_file(self, tmp_path):
        file = tmp_path / "sharded.yaml"
        file.write_text("distributed_type: FSDP\nnum_processes: 2\n")
        typed = f"accelerate launch --multi_gpu --config_file {file}"
        assert read(elastic(2) | accelerate(), 2, typed).num_processes == 2

    def test_a_compiler(self):
        line = only_refusal(elastic(2) | accelerate(ACCELERATE_DYNAMO_BACKEND="INDUCTOR"))
        assert line.startswith("ACCELERATE_DYNAMO_BACKEND: the launch asks to compile with INDUCTOR")

    @pytest.mark.parametrize(("backend", "num_gpus"), [("nccl", 0), ("mpi", 0), ("mpi", 2), ("ccl", 2)])
    def test_a_backend_the_device_cannot_have(self, backend, num_gpus):
        line = only_refusal(elastic(2), num_gpus, ddp_backend=backend)
        assert line.startswith(f"training.ddp_backend: got '{backend}'")
        assert "gloo" in line

    def test_everything_wrong_is_found_together(self):
        environ = elastic(4, ACCELERATE_MIXED_PRECISION="fp16", ACCELERATE_USE_FSDP="true")
        lines = refusals(environ, num_gpus=2, compute_dtype="float32", ddp_backend="mpi")
        assert [line.split(":")[0] for line in lines] == [
            "launch",
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_MIXED_PRECISION",
            "training.ddp_backend",
        ]
