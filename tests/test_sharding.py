"""FSDP2 with plain LoRA gives the adapter of DDP, on two processes over gloo; what it cannot do is refused."""

import json
import os
import signal
import sys

import pytest
from ruamel.yaml import YAML

from broken_off import adapter_of, largest_difference, make_place, summary_of
from checkout import ROOT
from fork_server import shared_server
from launched_ranks import clean_environ, run

CONFIG = YAML(typ="safe").load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
pytestmark = [pytest.mark.slow, pytest.mark.long]
UNSAVED = ("training.save_strategy=no", "training.save_steps=null")


def accelerate_environ():
    """What `accelerate launch` exports for the fsdp2 config (the slow test below holds it against accelerate)."""
    settings = {name.upper(): str(value).lower() for name, value in CONFIG["fsdp_config"].items()}
    policy = {"FSDP_AUTO_WRAP_POLICY": CONFIG["fsdp_config"]["fsdp_auto_wrap_policy"]}
    return {"ACCELERATE_USE_FSDP": "true", **settings, **policy}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def server():
    return shared_server()


def start(server, place, run_dir, *words, **environ):
    arguments = ["recipe.yaml", "--run-dir", run_dir, *UNSAVED, "training.ddp_timeout=30", *words]
    cache = str(place / "cache")
    return server.start(arguments, 2, place, place / f"{run_dir}.log", TUNEBOOK_CACHE=cache, **environ)


def test_the_adapter_is_that_of_ddp(server, place):
    sharded = start(server, place, "sharded", FAULT="shard_on_cpu", **accelerate_environ())
    assert server.wait(sharded).rank_codes() == [0, 0], sharded.output()[-5000:]
    replicated = server.wait(start(server, place, "replicated"))
    assert replicated.rank_codes() == [0, 0], replicated.output()[-5000:]
    told = [line for line in sharded.output().splitlines() if "are shards" in line]
    assert len(told) == 2
    for line in told:
        shards, parameters = line.split()[3], line.split()[5]
        assert shards == parameters != "0", line
    difference = largest_difference(adapter_of(place / "sharded"), adapter_of(place / "replicated"))
    print(f"{told[0]}; largest difference to DDP: {difference:.1e}")
    assert difference < 1e-5
    one, other = summary_of(place / "sharded"), summary_of(place / "replicated")
    assert one["status"] == other["status"] == "completed"
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], abs=1e-5)
    assert "note: FSDP2 shards the model" in sharded.output()


def test_accelerate_exports_what_the_config_says():
    code = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
words = ["--config_file", sys.argv[1], "finetune.py", "recipe.yaml"]
arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
print(json.dumps([arguments.use_fsdp, prepare_multi_gpu_env(arguments)]))
"""
    done = run([sys.executable, "-c", code, ROOT / "accelerate_configs" / "fsdp2.yaml"], clean_environ())
    use_fsdp, exported = json.loads(done.stdout.splitlines()[-1])
    assert use_fsdp
    wanted = {name.upper(): value for name, value in accelerate_environ().items()}
    assert wanted.items() <= exported.items()
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in exported  # no layer class is named


def test_a_signal_stops_a_sharded_run_without_a_checkpoint(server, place):
    words = ["training.num_train_epochs=200"]
    fault = {"FAULT": "shard_on_cpu", **accelerate_environ()}
    life = start(server, place, "stopped", *words, **fault)
    while "step 3/" not in life.output():
        server.poll(0.1)
        assert not life.is_over, life.output()[-3000:]
    os.kill(life.pids[1], signal.SIGTERM)
    assert server.wait(life, 30).rank_codes() == [75, 75], life.output()[-3000:]
    assert "and nothing is saved: run the same command again to start over" in life.output()
    assert not list((place / "stopped" / "checkpoints").glob("checkpoint-*"))
