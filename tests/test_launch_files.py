"""What `tunebook launch --as` prints, and launch/ holds: files that parse, name what exists, and start the run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from checkout import ROOT
from launched_ranks import clean_environ, run
from tunebook.commands import cli
from tunebook.errors import Refused

RECIPE = "recipes/qwen7b_qlora.yaml"
FILES = {"slurm": "launch/slurm.sh", "sky": "launch/sky.yaml", "k8s": "launch/k8s.yaml"}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def typed(monkeypatch, capsys):
    """Type `tunebook launch ...` and return what it prints."""

    def type_words(*words):
        monkeypatch.setattr(sys, "argv", ["tunebook", "launch", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        printed = capsys.readouterr()
        assert left.value.code == 0, printed.err
        return printed.out

    return type_words


def refusal(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["tunebook", "launch", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    return capsys.readouterr().err


def load_yaml(text):
    return YAML(typ="safe").load(text)


def scripts_of(kind, text):
    """Return the shell text that a file runs on each machine."""
    if kind == "slurm":
        return [text]
    task = load_yaml(text)
    if kind == "sky":
        return [task["run"], task["setup"]]
    roles = task["spec"]["pytorchReplicaSpecs"].values()
    return [role["template"]["spec"]["containers"][0]["command"][2] for role in roles]


@pytest.mark.parametrize("kind", FILES)
def test_the_shipped_files_are_what_is_printed(kind, typed):
    text = (ROOT / FILES[kind]).read_text()
    made_by = re.search(r"Made by: tunebook launch (.*)", text)[1]
    assert typed(*shlex.split(made_by)) == text


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("numbers", [(2, 4), (1, 8), (4, 2)])
def test_files_parse_and_name_what_exists(kind, numbers, typed):
    nodes, gpus = numbers
    text = typed(RECIPE, "--nodes", nodes, "--gpus", gpus, "--as", kind, "--run-dir=/runs/a b's")
    assert "= 64 rows per step" in text.splitlines()[0 if kind != "slurm" else 1]
    for script in scripts_of(kind, text):
        subprocess.run(["bash", "-n", "-c", script], check=True)
        for word in re.findall(r"[\w./-]+\.(?:py|yaml|txt)\b", re.sub("#.*", "", script)):
            assert (ROOT / word).is_file(), word
    starts = [script for script in scripts_of(kind, text) if "torchrun" in script]
    assert starts and all(f"--nnodes={nodes} --nproc_per_node={gpus} " in script for script in starts)
    assert all("'--run-dir=/runs/a b'\"'\"'s'" in script for script in starts)


def test_numbers_of_the_cluster(typed):
    sky = load_yaml(typed(RECIPE, "--nodes", 4, "--gpus", 2, "--as", "sky"))
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (4, "A100-80GB:2")
    assert sky["resources"]["use_spot"] and "job_recovery" in sky["resources"]
    job = load_yaml(typed(RECIPE, "--nodes", 4, "--gpus", 2, "--as", "k8s"))
    assert (job["kind"], job["spec"]["nprocPerNode"]) == ("PyTorchJob", "2")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {name: role["replicas"] for name, role in roles.items()} == {"Master": 1, "Worker": 3}
    for role in roles.values():
        [container] = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["resources"]["limits"]["nvidia.com/gpu"] == 2
    one = load_yaml(typed(RECIPE, "--gpus", 8, "--as", "k8s"))
    assert list(one["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    slurm = typed(RECIPE, "--nodes", 4, "--gpus", 2, "--as", "slurm")
    assert "#SBATCH --nodes=4\n" in slurm and "#SBATCH --gpus-per-node=2\n" in slurm


def test_commands_for_one_machine_and_for_several(typed):
    [comment, command] = typed(RECIPE, "--gpus", 8, "--as", "accelerate").splitlines()
    assert comment == "# 1 machine with 8 GPUs: 8 processes x 8 rows x 1 micro-step = 64 rows per step"
    assert command == (
        f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 finetune.py {RECIPE}"
    )
    lines = typed(RECIPE, "--nodes", 2, "--gpus", 4, "--as", "torchrun", "training.seed=3").splitlines()
    starts = [line for line in lines if not line.startswith("#")]
    assert [re.search(r"--node_rank=(\d)", line)[1] for line in starts] == ["0", "1"]
    assert all(line.endswith(f" finetune.py {RECIPE} training.seed=3") for line in starts)


# What a Service, a pod and a bucket may be called, with room for what their owners add to it.
DNS_1035 = r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?"
STEMS = (
    "123", "1e3", "0x1f", "on", "no", "null", "true", "y", "2024-11-30", "7b_qlora", "7b-qlora", "run_7b_qlora",
    "run-7b-qlora", "a_b", "a-b", "a.b", "a__b", "_a_b", "a_b_", "A_b", "日本", "日本語", "_", "-x", "run", "tunebook",
    "é", "e\u0301", "x" * 49, "x" * 50, "x" * 51, "x" * 200, "x" * 49 + "-y",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["k8s", "sky"])
def test_whatever_a_recipe_is_called_clusters_take_its_name(kind, typed, tmp_path, monkeypatch):
    recipe = (ROOT / RECIPE).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names, folders = [], []
    for stem in STEMS:
        (tmp_path / f"{stem}.yaml").write_text(recipe, encoding="utf-8")
        text = typed(f"./{stem}.yaml", "--gpus", 2, "--as", kind)
        # Clusters read YAML 1.1, where on, no, 1e3 and dates are no text.
        task = YAML(typ="safe")
        task.version = (1, 1)
        task = task.load(text)
        names.append(task["name"] if kind == "sky" else task["metadata"]["name"])
        folders += {
            re.search(r"--run-dir (\S+)", script)[1] for script in scripts_of(kind, text) if "torchrun" in script
        }
        assert kind == "k8s" or task["file_mounts"]["/runs"]["name"] == f"{names[-1]}-runs"
    assert all(isinstance(name, str) and re.fullmatch(DNS_1035, name) for name in names), names
    assert len(set(names)) == len(set(folders)) == len(STEMS)
    assert (names[STEMS.index("a_b")], names[STEMS.index("on")], names[STEMS.index("run")]) == ("a-b", "on", "run")


def test_runs_in_folders_of_their_own_are_jobs_of_their_own(typed):
    runs = ("runs/a", "runs/b", "seeds/1/qwen7b_qlora", "seeds/2/qwen7b_qlora", "/", ".")
    jobs = [load_yaml(typed(RECIPE, "--gpus", 2, "--as", "k8s", "--run-dir", run)) for run in runs]
    names = [job["metadata"]["name"] for job in jobs]
    assert len(set(names)) == len(runs) and all(re.fullmatch(DNS_1035, name) for name in names), names


def test_numbers_of_processes_and_of_gpus_agree(typed, monkeypatch, capsys):
    eight = typed(RECIPE, "--nodes", 2, "--gpus", 4, "--as", "torchrun")
    for numbers in (("--num-processes", 8), ("--num-processes", 8, "--gpus", 4)):
        assert typed(RECIPE, "--nodes", 2, *numbers, "--as", "torchrun") == eight
    monkeypatch.setattr(cli, "count_gpus", lambda: 8)
    assert "--nproc_per_node=4 " in typed(RECIPE, "--num-processes", 4, "--as", "torchrun")
    assert "--nproc_per_node=8 " in typed(RECIPE, "--as", "torchrun")
    line = refusal(monkeypatch, capsys, RECIPE, "--num-processes", "4", "--gpus", "2", "--as", "torchrun")
    assert "--num-processes: 1 machine with --gpus 2 run 2 processes, not 4. Leave --num-processes out" in line
    line = refusal(monkeypatch, capsys, RECIPE, "--num-processes", "3", "--nodes", "2", "--as", "slurm")
    assert "--num-processes: 3 processes cannot be shared evenly by 2 machines" in line


def test_what_would_not_run_is_refused(monkeypatch, capsys):
    line = refusal(monkeypatch, capsys, RECIPE, "--nodes", "4", "--gpus", "8", "--as", "slurm")
    assert "64 rows are no whole number of micro-steps of 32 processes x 8 rows" in line
    assert "Add --as accelerate or torchrun" in refusal(monkeypatch, capsys, RECIPE, "--nodes", "2")
    line = refusal(monkeypatch, capsys, RECIPE, "--as", "slurm", "--fresh")
    assert "would set its own run aside each time it is started again" in line
    assert "learning_rte" in refusal(monkeypatch, capsys, RECIPE, "--as", "sky", "training.learning_rte=1")
    assert "a line break" in refusal(monkeypatch, capsys, RECIPE, "--as", "sky", "--run-dir", "a\nb")
    assert "'lsf' is not one of" in refusal(monkeypatch, capsys, RECIPE, "--as", "lsf")


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$FOLDER/asked"
[ "$1" = show ] && echo node7 && echo node8
true
"""
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$FOLDER/started"
env | grep -E '^PET_' >> "$FOLDER/started"
summary=runs/qwen7b_qlora/run_summary.json
[ -n "$STATUS" ] && mkdir -p runs/qwen7b_qlora && echo "{\\"status\\": \\"$STATUS\\"}" > $summary
[ -n "$SIGNAL" ] && kill -s "$SIGNAL" "$PPID"
exit "$CODE"
"""


@pytest.mark.parametrize(
    ("status", "code", "signal", "left_before", "requeued", "ends_with"),
    [
        ("interrupted", 1, "USR1", False, True, 0),
        ("interrupted", 1, "TERM", False, False, 1),  # scancel
        ("completed", 0, "", False, False, 0),
        ("failed", 1, "", False, False, 1),
        ("", 1, "", False, False, 1),  # refused before a folder was made
        ("", 1, "", True, False, 1),  # refused, and an earlier life was interrupted
    ],
)
def test_the_slurm_script_goes_back_into_the_queue_when_interrupted(
    tmp_path, status, code, signal, left_before, requeued, ends_with
):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    if left_before:
        folder = tmp_path / "runs" / "qwen7b_qlora"
        folder.mkdir(parents=True)
        (folder / "run_summary.json").write_text(json.dumps({"status": "interrupted"}))
    slurm = {"SLURM_JOB_ID": "31", "SLURM_JOB_NODELIST": "node[7-8]"}
    told = {"FOLDER": str(tmp_path), "STATUS": status, "CODE": str(code), "SIGNAL": signal}
    path = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", ROOT / "launch" / "slurm.sh"],
        cwd=tmp_path,
        env={**os.environ, **slurm, **told, **path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ends_with, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert ("requeue 31" in asked) == requeued
    words = (tmp_path / "started").read_text().splitlines()
    assert words[:5] == [
        "--nnodes=2",
        "--nproc_per_node=4",
        "--node_rank=1",
        "--master_addr=node7",
        "--master_port=20031",
    ]
    assert words[5:7] == ["finetune.py", RECIPE]
    assert "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in words


@pytest.mark.slow
def test_the_launchers_take_what_is_printed(typed):
    """The printed words are read by torchrun's and accelerate's own parsers, without starting."""
    code = """
import json, shlex, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch.distributed.run import get_args_parser
for line in sys.argv[1:]:
    words = shlex.split(line.replace("$MASTER_ADDR", "node7"))
    if words[0] == "torchrun":
        read = get_args_parser().parse_args(words[1:])
        print(read.nnodes, read.nproc_per_node, read.node_rank, read.training_script)
    else:
        read, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        print(read.num_machines, read.num_processes, read.machine_rank, read.training_script, read.main_process_ip)
"""
    printed = [typed(RECIPE, "--nodes", 2, "--gpus", 4, "--as", kind) for kind in ("torchrun", "accelerate")]
    lines = [line for text in printed for line in text.splitlines() if not line.startswith("#")]
    done = run([sys.executable, "-c", code, *lines], clean_environ())
    assert done.stdout.splitlines() == [
        "2 4 0 finetune.py",
        "2 4 1 finetune.py",
        "2 8 0 finetune.py node7",
        "2 8 1 finetune.py node7",
    ]


def test_a_refusal_is_one():
    from tunebook.launching.command_line import read_command
    from tunebook.launching.files import check_job

    check_job("torchrun", read_command([RECIPE, "--fresh"]), [RECIPE, "--fresh"])
    with pytest.raises(Refused, match="--plan starts nothing"):
        check_job("torchrun", read_command([RECIPE, "--plan"]), [RECIPE, "--plan"])
