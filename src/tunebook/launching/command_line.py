"""The words after `finetune.py`: a recipe, overrides, and a few options; no option is a launcher's own."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from tunebook.errors import Problem, Refused

DeviceName = Literal["cuda", "cpu"]
DeviceOption = Annotated[
    DeviceName | None, typer.Option("--device", help="With --num-processes: what they run on; cuda if left out.")
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="With --plan: does it fit a GPU of so many GiB, or a GPU such as a100?")
]
StepSecondsOption = Annotated[
    float | None, typer.Option("--step-seconds", help="With --plan: the seconds that one step takes.")
]


@dataclass(frozen=True)
class Command:
    """What was typed."""

    recipe: str
    overrides: tuple[str, ...] = ()
    plan: bool = False
    json: bool = False
    num_processes: int | None = None
    device: DeviceName | None = None
    rows: int | None = None
    run_dir: str | None = None
    fresh: bool = False
    gpu: str | None = None
    step_seconds: float | None = None


def read_command(words: Sequence[str], program: str = "finetune.py") -> Command:
    """Read the command line of `finetune.py` or `train_ddp.py`. Raises Refused for other words; --help exits."""
    command: list[Command] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help="Fine-tune the model of a recipe, on as many processes as the launcher started.")
    def finetune(  # noqa: PLR0913, PLR0917 - one for each option
        recipe: Annotated[str, typer.Argument(help="The recipe, for example recipes/tiny_qlora.yaml.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the recipe's.")
        ] = None,
        plan: Annotated[bool, typer.Option("--plan", help="Print what the run would do, and stop.")] = False,
        json: Annotated[bool, typer.Option("--json", help="With --plan: print it as JSON.")] = False,
        num_processes: Annotated[
            int | None, typer.Option("--num-processes", min=1, help="With --plan: for a world of N processes.")
        ] = None,
        device: DeviceOption = None,
        rows: Annotated[
            int | None, typer.Option("--rows", min=1, help="With --plan: how many rows the data has.")
        ] = None,
        run_dir: Annotated[
            str | None,
            typer.Option("--run-dir", help="The run folder; else runs/NAME (train_ddp.py: NAME-ddp) for NAME.yaml."),
        ] = None,
        fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is set aside.")] = False,
        gpu: GpuOption = None,
        step_seconds: StepSecondsOption = None,
    ) -> None:
        given = (plan, json, num_processes, device, rows, run_dir, fresh, gpu, step_seconds)
        command.append(Command(recipe, tuple(overrides or ()), *given))

    try:
        app(list(words), prog_name=program, standalone_mode=False)
    except TyperException as error:
        fix = f"{program} RECIPE [section.key=value ...], or --help"
        raise Refused(Problem(error.format_message().rstrip("."), fix, "command line")) from error
    if not command:  # --help
        raise SystemExit(0)
    _check_options(command[0])
    return _after_restart(command[0])


def _after_restart(command: Command) -> Command:
    """Return the command without --fresh in an attempt after the first: what it began is what is to be gone on with."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return replace(command, fresh=False) if is_restart else command


def _check_options(command: Command) -> None:
    needs_plan = {
        "--json": command.json,
        "--num-processes": command.num_processes is not None,
        "--device": command.device is not None,
        "--rows": command.rows is not None,
        "--gpu": command.gpu is not None,
        "--step-seconds": command.step_seconds is not None,
    }
    problems = [
        Problem(f"{option} is about a plan", _without_plan(option), "command line")
        for option, given in needs_plan.items()
        if given and not command.plan
    ]
    if command.device and command.num_processes is None and command.plan:
        problems.append(Problem("--device is about a world of --num-processes N", "Give N, too", "command line"))
    if command.step_seconds is not None and not 0 < command.step_seconds < math.inf:
        problems.append(Problem("--step-seconds is no time", "Give seconds, such as 0.8", "command line"))
    if command.run_dir == "":
        problems.append(Problem("--run-dir is empty", "Name a folder", "command line"))
    if problems:
        raise Refused(problems)


def _without_plan(option: str) -> str:
    if option == "--num-processes":
        return "Add --plan, or start N processes: accelerate launch --num_processes N finetune.py RECIPE"
    return "Add --plan"


def command_name() -> str:
    """Return `tunebook` as it can be typed here: by its path where the environment it is in is not activated."""
    if shutil.which("tunebook"):
        return "tunebook"
    beside = Path(sys.executable).parent / "tunebook"
    here = beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside
    return shlex.quote(str(here))
