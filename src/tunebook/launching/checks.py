"""Whether the launcher's environment makes one group of processes, and contradicts nothing in the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass

from tunebook.errors import Problem
from tunebook.launching.command import DeviceType, Launch, is_true
from tunebook.launching.sharding import check_switches, is_sharded

LAST_PORT = 65535
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}  # accelerate's names, the recipe's names

STRATEGIES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
CONFIG_STRATEGIES = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}

# The number of tasks that mpirun or srun started, each without torch's variables. SLURM_NTASKS alone is no sign: a
# batch script has it too, and only what srun started has a step.
TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all, and among those of its machine."""

    num_processes: int = 1
    rank: int = 0
    local_rank: int = 0
    num_local_processes: int = 1


def read_ranks(launch: Launch) -> tuple[Ranks, list[Problem]]:
    """Return the ranks that torch's variables give, and what is wrong with them; a single process where none is set."""
    environ = launch.environ
    numbers, problems = _read_numbers(environ)
    size = numbers["WORLD_SIZE"]
    if problems:
        return Ranks(), problems
    if size is None:
        return Ranks(), _check_stray_ranks(launch, numbers)
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # -1 is torch's old word for "not launched": beside a WORLD_SIZE it would wait for a rank 0 that never comes.
    unset = [name for name in names if not environ.get(name) or environ[name].strip() == "-1"]
    missing = unset if size > 1 else []
    if missing:
        are = "is" if len(missing) == 1 else "are"
        message = f"WORLD_SIZE is {size} but {', '.join(missing)} {are} not set, so no group can form"
        fix = f"Type {launch.render_launch(size)}, or clear it with `unset WORLD_SIZE`"
        return Ranks(), [Problem(message, fix, where="environment")]
    num_local = numbers["LOCAL_WORLD_SIZE"]
    if num_local is None:  # set by hand: one machine, or as many as its GPUs
        num_local = min(size, launch.num_gpus) if launch.device_type == "cuda" else size
    ranks = Ranks(size, numbers["RANK"] or 0, numbers["LOCAL_RANK"] or 0, num_local)
    return ranks, [*_check_ranges(ranks), *_check_port(ranks, numbers["MASTER_PORT"])]


def check_one_group(launch: Launch, ranks: Ranks) -> list[Problem]:
    """Refuse processes that were started together but would each train alone and overwrite each other's output."""
    problems = []
    name, tasks = _started_tasks(launch.environ)
    # torchrun and accelerate say how many machines' agents joined; one that joined none leads a group of its own.
    is_apart = ranks.num_processes == 1 or launch.environ.get("GROUP_WORLD_SIZE") == "1"
    if tasks > 1 and is_apart:
        problems.append(
            Problem(
                f"mpirun or srun started {tasks} tasks, and they would not form one group",
                f"Start it once, without them: {launch.render_launch(tasks)}; "
                f"for runs that are apart on purpose: env -u {name} ...",
                where=name,
            )
        )
    machines = launch.command.num_machines if launch.command else None
    if ranks.num_processes == 1 and machines is not None and machines > 1:
        problems.append(
            Problem(
                f"accelerate started one process alone although it was asked for {machines} machines",
                "Add --multi_gpu: without it each machine would train by itself",
                where="accelerate launch",
            )
        )
    return problems


def check_strategy(launch: Launch, ranks: Ranks) -> list[Problem]:
    """Refuse DeepSpeed and the like, in effect or not, FSDP but for FSDP2, and a compiler that the launcher names."""
    shards = is_sharded(launch, ranks.num_processes)
    strategies = {name: one for name, one in STRATEGIES.items() if not (shards and one == "FSDP")}
    asked = [(name, strategy) for name, strategy in strategies.items() if is_true(launch.environ.get(name))]
    command = launch.command if not shards else None
    if not asked and command is not None and command.distributed_type in CONFIG_STRATEGIES:
        asked = [(command.config_file or "accelerate config", CONFIG_STRATEGIES[command.distributed_type])]
    typed = f"Type {launch.render_launch(max(ranks.num_processes, 2))}"
    problems = [
        Problem(
            f"{strategy} would not take effect: {_why_not(strategy, launch, ranks)}",
            typed if command else f"Clear it with `unset {where}`",
            where=where,
        )
        for where, strategy in asked
    ]
    if shards:
        problems += check_switches(launch.environ)
    compiler = launch.environ.get("ACCELERATE_DYNAMO_BACKEND", "")
    if compiler.upper() not in ("NO", ""):
        problems.append(
            Problem(
                f"the launch asks to compile with {compiler}, and the recipe owns that",
                "Leave dynamo_backend out of the launch, and set training.torch_compile_backend in the recipe",
                where="ACCELERATE_DYNAMO_BACKEND",
            )
        )
    return problems


def _why_not(strategy: str, launch: Launch, ranks: Ranks) -> str:
    """Return why a strategy is not trained with here; FSDP2 is elsewhere, on several GPUs."""
    if strategy != "FSDP":
        return "this trains with DistributedDataParallel"
    if launch.device_type == "cpu":
        gpus = "no GPU is visible here" if not launch.num_gpus else "the launch chose the CPU"
        return f"it shards a model over GPUs, and {gpus}"
    if launch.environ.get("FSDP_VERSION") != "2":
        return "only its version 2 (fsdp_version: 2, as in accelerate_configs/fsdp2.yaml) is trained with here"
    return f"it shards a model over several processes, and {ranks.num_processes} was started"


def check_precision(launch: Launch, compute_dtype: str) -> list[Problem]:
    """Refuse an environment precision that is not the recipe's compute type; "no" is what accelerate always exports.

    "auto" computes in float32 on the CPU and, where the GPU has it, in bfloat16.
    """
    name = "ACCELERATE_MIXED_PRECISION"
    stated = launch.environ.get(name, "no").lower()
    automatic = {"cpu": "float32", "cuda": "bfloat16"}[launch.device_type]
    computes = automatic if compute_dtype == "auto" else compute_dtype
    if stated == "no" or PRECISIONS.get(stated) == computes:
        return []
    command = launch.command
    if command is None:
        fix = f"Clear it with `unset {name}`"
    elif command.mixed_precision_option:
        fix = "Leave --mixed_precision out of the launch"
    else:
        fix = f'Set mixed_precision: "no" in {command.config_file or "the accelerate config"}'
    if stated in PRECISIONS and (launch.device_type == "cuda" or stated == "bf16"):
        fix += f", or set model.dtype={PRECISIONS[stated]}"
    origin = " (auto)" if compute_dtype == "auto" else ""
    message = f"the environment says {stated!r}, the recipe computes in {computes}{origin} and owns precision"
    return [Problem(message, fix, where=name, key="model.dtype")]


def check_backend(ddp_backend: str | None, device_type: DeviceType, num_processes: int) -> list[Problem]:
    """Refuse a backend that a group of several processes on this device cannot have; one process has no group."""
    allowed = ("nccl", "gloo") if device_type == "cuda" else ("gloo",)
    if ddp_backend is None or num_processes == 1 or ddp_backend in allowed:
        return []
    place = "GPUs" if device_type == "cuda" else "the CPU"
    return [
        Problem(
            f"got {ddp_backend!r}, but {num_processes} processes on {place} talk through {' or '.join(allowed)}",
            f"Leave it out ({allowed[0]} is chosen), or write {allowed[0]}",
            key="training.ddp_backend",
        )
    ]


def _read_numbers(environ: Mapping[str, str]) -> tuple[dict[str, int | None], list[Problem]]:
    """Return torch's whole-number variables, None where unset or -1 (the old word for "not launched")."""
    numbers: dict[str, int | None] = {}
    problems = []
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = environ.get(name, "").strip()
        numbers[name] = int(text) if text.isdecimal() else None
        if text not in ("", "-1") and not text.isdecimal():
            problems.append(
                Problem(f"got {text!r}, a whole number is needed", f"Clear it with `unset {name}`", where=name)
            )
    return numbers, problems


def _check_stray_ranks(launch: Launch, numbers: Mapping[str, int | None]) -> list[Problem]:
    """Refuse a rank without a world: accelerate would take LOCAL_RANK alone for a launch."""
    stray = [name for name in ("RANK", "LOCAL_RANK") if numbers[name] is not None]
    if not stray:
        return []
    are = "is" if len(stray) == 1 else "are"
    message = f"{' and '.join(stray)} {are} set but WORLD_SIZE is not, so no group can form"
    fix = f"Clear with `unset {' '.join(stray)}`, or type {launch.render_launch(2)}"
    return [Problem(message, fix, where="environment")]


def _check_ranges(ranks: Ranks) -> list[Problem]:
    again = "Let a launcher set these: accelerate launch, torchrun or tunebook launch"
    problems = []
    if ranks.num_processes < 1:
        problems.append(Problem("got 0, a world has at least 1 process", again, where="WORLD_SIZE"))
    elif ranks.rank >= ranks.num_processes:
        message = f"got {ranks.rank}, allowed 0 to {ranks.num_processes - 1} (WORLD_SIZE is {ranks.num_processes})"
        problems.append(Problem(message, again, where="RANK"))
    local, size = ranks.local_rank, ranks.num_local_processes
    if local >= max(size, 1):
        message = f"got {local}, allowed 0 to {max(size, 1) - 1} (LOCAL_WORLD_SIZE is {size})"
        problems.append(Problem(message, again, where="LOCAL_RANK"))
    elif size > ranks.num_processes >= 1:
        message = f"got {size}, more than the WORLD_SIZE of {ranks.num_processes}"
        problems.append(Problem(message, again, where="LOCAL_WORLD_SIZE"))
    return problems


def _check_port(ranks: Ranks, port: int | None) -> list[Problem]:
    """Refuse a number that is no port; 0, which means any, would be another one for each process."""
    if ranks.num_processes <= 1 or port is None or 1 <= port <= LAST_PORT:
        return []
    fix = "Give a free one, for example 29500; torchrun, accelerate launch and tunebook launch find one themselves"
    return [Problem(f"got {port}, a port is a number from 1 to {LAST_PORT}", fix, where="MASTER_PORT")]


def _started_tasks(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable by which mpirun or srun tells how many tasks it started, and the number (1: not started)."""
    for name in TASK_COUNTS:
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            return name, int(count)
    count = environ.get("SLURM_NTASKS", "")
    in_step = "SLURM_STEP_ID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    return ("SLURM_NTASKS", int(count)) if in_step and count.isdecimal() else ("", 1)
