"""Pretended launches: environments, command lines and GPUs that are not there."""

import shlex

import pytest

from tunebook.errors import Refused
from tunebook.launching.world import Surroundings, read_world

ARGV = ("finetune.py", "recipes/x.yaml", "training.seed=3")
TYPED = shlex.join(ARGV)


def elastic(size=2, rank=0, **changes):
    """The environment that torchrun gives to one rank of `size` on one machine."""
    names = {
        "WORLD_SIZE": size,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
    } | changes
    return {name: str(value) for name, value in names.items() if value is not None}


def accelerate(**changes):
    """What `accelerate launch` adds, all there is for the single process it starts itself."""
    return {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_USE_CPU": "False",
    } | changes


def read(environ, num_gpus=0, typed="", has_gpu_node=False, **recipe):
    """Read a pretended world; `typed` is what stood before the script on the parent's command line."""
    parent = (*shlex.split(typed), *ARGV) if typed else ()
    around = Surroundings(num_gpus, has_gpu_node, parent, ARGV)
    return read_world(environ, surroundings=around, **recipe)


def refusals(environ, num_gpus=0, typed="", **recipe):
    with pytest.raises(Refused) as refused:
        read(environ, num_gpus, typed, **recipe)
    return [problem.render() for problem in refused.value.problems]


def only_refusal(*arguments, **options):
    lines = refusals(*arguments, **options)
    assert len(lines) == 1, lines
    return lines[0]
