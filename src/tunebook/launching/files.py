"""What to type, or to submit, where a run is not started on this machine: commands and files for several machines.

Each only calls accelerate or torchrun with the recipe; the numbers come from the plan.
"""

import hashlib
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal

from tunebook.errors import Problem, Refused
from tunebook.launching.command_line import Command
from tunebook.plan.arithmetic import DECIDED_AT_START, counted
from tunebook.plan.plan import Plan

Kind = Literal["accelerate", "torchrun", "slurm", "sky", "k8s"]
TEMPLATES = {"slurm": "slurm.sh", "sky": "sky.yaml", "k8s": "k8s.yaml"}
# Where the shared volume or bucket is mounted; Slurm jobs run in a folder that is shared already.
MOUNTED = "/runs"
LONGEST_NAME = 50  # of the 63 that names have, some go to -worker-N or -runs
PORT = 29500


def render_launch_file(kind: Kind, plan: Plan, words: Sequence[str], nodes: int, gpus: int) -> str:
    """Return the commands (accelerate, torchrun) or the file (slurm, sky, k8s) that start a run on several machines.

    `words` are those that follow `finetune.py`; the plan is that of nodes x gpus processes.
    """
    arithmetic = _render_arithmetic(plan, nodes, gpus)
    typed = shlex.join(["finetune.py", *words])
    if kind in ("accelerate", "torchrun"):
        return _render_commands(kind, arithmetic, typed, nodes, gpus)
    name = job_name(plan)
    mounted = kind != "slurm" and plan.origins["run_dir"] != "--run-dir"
    return _render_template(
        TEMPLATES[kind],
        arithmetic=arithmetic,
        made_by=shlex.join(["tunebook", "launch", *words, "--nodes", str(nodes), "--gpus", str(gpus), "--as", kind]),
        name=name,
        nodes=nodes,
        gpus=gpus,
        run_dir=shlex.quote(plan.run_dir),
        command=f"{typed} --run-dir {MOUNTED}/{name}" if mounted else typed,
        roles=[("Master", 1), *([("Worker", nodes - 1)] if nodes > 1 else [])],
    )


def check_job(kind: Kind, command: Command, words: Sequence[str]) -> None:
    """Raise Refused for words that would be wrong in a file, or in a job that is started again."""
    problems = []
    if any(not word.isprintable() for word in words):
        problems.append(Problem("a line break cannot stand in a command that is printed", where="command line"))
    if kind in TEMPLATES and command.fresh:
        message = f"--fresh in a {kind} job would set its own run aside each time it is started again"
        problems.append(Problem(message, "Leave it out", "command line"))
    if command.plan:
        problems.append(Problem("--plan starts nothing, so there is nothing to launch", "Leave it out", "command line"))
    if problems:
        raise Refused(problems)


def gpus_of_each(nodes: int, gpus: int | None, num_processes: int | None) -> int | None:
    """Return the GPUs of each machine that the numbers typed say, None where they say nothing.

    `num_processes` are those of all machines, as for accelerate. Raises Refused where the numbers contradict.
    """
    if num_processes is None or num_processes == nodes * (gpus or 0):
        return gpus
    if gpus is None and num_processes % nodes == 0:
        return num_processes // nodes
    machines = counted(nodes, "machine")
    if gpus is None:
        message = f"{counted(num_processes, 'process')} cannot be shared evenly by {machines}"
        fix = f"Give a multiple of {nodes}, or --gpus for each machine"
    else:
        message = f"{machines} with --gpus {gpus} run {counted(nodes * gpus, 'process')}, not {num_processes}"
        fix = "Leave --num-processes out"
    raise Refused(Problem(message, fix, "--num-processes"))


def job_name(plan: Plan) -> str:
    """Return a name for the run that every cluster takes (DNS-1035): lower-case letters, digits and hyphens.

    runs/qwen7b_qlora is qwen7b-qlora. A run folder that could not be told from the name again has a part of its sha256
    added, so that no two share a job, a bucket or a folder.
    """
    name = re.sub(r"[^a-z0-9]+", "-", plan.run_dir.rstrip("/").rpartition("/")[2].lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")
    if len(name) <= LONGEST_NAME and plan.run_dir == f"runs/{name.replace('-', '_')}":
        return name
    digest = hashlib.sha256(plan.run_dir.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].strip('-')}-{digest}"


def _render_arithmetic(plan: Plan, nodes: int, gpus: int) -> str:
    machines = f"{counted(nodes, 'machine')} with {counted(gpus, 'GPU')}{' each' if nodes > 1 else ''}"
    is_open = plan.origins["per_device_train_batch_size"] == DECIDED_AT_START
    factors = (
        counted(plan.world_size, "process"),
        counted(plan.per_device_train_batch_size, "row") + (" (auto)" if is_open else ""),
        counted(plan.gradient_accumulation_steps, "micro-step"),
    )
    return f"{machines}: {' x '.join(factors)} = {plan.global_batch_size} rows per step"


def _render_commands(kind: str, arithmetic: str, typed: str, nodes: int, gpus: int) -> str:
    lines = [f"# {arithmetic}"]
    if nodes == 1:
        config = "single_gpu" if gpus == 1 else "ddp"
        start = {
            "accelerate": f"accelerate launch --config_file accelerate_configs/{config}.yaml --num_processes {gpus}",
            "torchrun": f"torchrun --standalone --nproc_per_node={gpus}",
        }[kind]
        return "\n".join([*lines, f"{start} {typed}"])
    lines.append("# MASTER_ADDR is machine 0 as the others see it. The run folder must be on a disk that all share.")
    for node in range(nodes):
        start = {
            "accelerate": f"accelerate launch --config_file accelerate_configs/multi_node.yaml --num_machines {nodes} "
            f"--num_processes {nodes * gpus} --machine_rank {node} --main_process_ip $MASTER_ADDR "
            f"--main_process_port {PORT}",
            "torchrun": f"torchrun --nnodes={nodes} --nproc_per_node={gpus} --node_rank={node} "
            f"--master_addr=$MASTER_ADDR --master_port={PORT}",
        }[kind]
        lines += [f"# on machine {node}", f"{start} {typed}"]
    return "\n".join(lines)


def _render_template(file: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    # The usual braces have a meaning in shells and in YAML.
    environment = Environment(
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=StrictUndefined,
        keep_trailing_newline=False,
        autoescape=False,
    )
    text = files("tunebook.launching").joinpath("templates", file).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
