"""FSDP2 is taken on GPUs for plain LoRA, and refused, with the reason and the way out, wherever it was not shown."""

import pytest

from pretended_worlds import accelerate, elastic, only_refusal, read, refusals
from tiny_training import NF4, build_recipe
from tunebook.errors import Refused
from tunebook.launching.world import World
from tunebook.plan.plan import build_plan

FSDP2 = accelerate(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="false")
SHARDED = World(num_processes=2, num_local_processes=2, device_type="cuda", num_gpus=2, backend="nccl", shards=True)


def objections(**recipe):
    with pytest.raises(Refused) as refused:
        build_plan(build_recipe("base", **recipe), SHARDED)
    return [problem.render() for problem in refused.value.problems]


def test_several_gpus():
    world = read(elastic(2) | FSDP2, 2, "accelerate launch --config_file accelerate_configs/fsdp2.yaml")
    assert (world.shards, world.backend) == (True, "nccl")
    assert not read(elastic(2) | accelerate(), 2).shards


def test_a_file_that_says_fsdp_is_taken_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\n")
    assert read(elastic(2) | FSDP2, 2, f"accelerate launch --config_file {file}").shards


@pytest.mark.parametrize(
    ("num_gpus", "changes", "why"),
    [
        (0, {}, "it shards a model over GPUs, and no GPU is visible here"),
        (2, {"ACCELERATE_USE_CPU": "true"}, "it shards a model over GPUs, and the launch chose the CPU"),
        (2, {"FSDP_VERSION": "1"}, "only its version 2 (fsdp_version: 2, as in accelerate_configs/fsdp2.yaml)"),
        (2, {"FSDP_VERSION": ""}, "only its version 2"),
        (1, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "over several processes, and 1 was started"),
    ],
)
def test_where_it_is_not_trained_with_the_reason_is_said(num_gpus, changes, why):
    line = only_refusal(elastic(2) | FSDP2 | changes, num_gpus, "accelerate launch --use_fsdp")
    assert why in line.partition("FSDP would not take effect: ")[2]


@pytest.mark.parametrize(
    "name", ["FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"]
)
def test_switches_that_change_what_is_trained(name):
    line = only_refusal(elastic(2) | FSDP2 | {name: "true"}, 2)
    assert line.startswith(f"{name}: ") and f"Set {name.lower()}: false in the accelerate config" in line


def test_plain_lora_is_planned():
    plan = build_plan(build_recipe("base"), SHARDED)
    assert any(note.startswith("FSDP2 shards the model") for note in plan.notes)
    assert not any("FSDP2" in note for note in build_plan(build_recipe("base"), World()).notes)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"lora": None}, "lora"),
        ({"quantization": NF4}, "quantization"),
        ({"lora": {"r": 4, "use_dora": True}}, "lora.use_dora"),
        ({"lora": {"r": 4, "modules_to_save": ["lm_head"]}}, "lora.modules_to_save"),
        ({"lora": {"r": 4, "init_lora_weights": "pissa"}}, "lora.init_lora_weights"),
        ({"lora": {"r": 4, "bias": "all"}}, "lora.bias"),
        ({"save_strategy": "steps"}, "training.save_strategy"),
        ({"optim": "adamw_8bit"}, "training.optim"),
        ({"fp16": True}, "model.dtype"),
        ({"batch": {"check_replicas": 1}}, "training.check_replicas"),
    ],
)
def test_what_was_not_shown_is_refused(recipe, key):
    [line] = objections(**recipe)
    assert line.startswith(f"recipes/tiny.yaml: {key}: under FSDP2 ")


def test_everything_is_said_together():
    assert len(objections(quantization=NF4, save_strategy="epoch", optim="paged_adamw_8bit")) == 3
    says = elastic(2) | FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert len(refusals(says, 2, compute_dtype="float32")) == 2
