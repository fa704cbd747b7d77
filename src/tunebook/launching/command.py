"""How this process was started: by which launcher, with which command, and the commands to type instead."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Launcher = Literal["accelerate", "torchrun", "tunebook", "python", "none"]
DeviceType = Literal["cuda", "cpu"]

LAUNCHED_BY_TUNEBOOK = "TUNEBOOK_LAUNCH"  # set by `tunebook launch`, whose agent is torchrun's


@dataclass(frozen=True)
class LaunchCommand:
    """What `accelerate launch` was asked for: its options, and what they leave open from its config file.

    None where it was not said or cannot be known. accelerate passes none of this on, so it is read from the command
    line of the parent process. `mixed_precision_option` tells whether the precision was an option or in the file.
    """

    config_file: str | None = None
    num_processes: int | None = None
    num_machines: int | None = None
    distributed_type: str | None = None
    mixed_precision_option: bool = False


@dataclass(frozen=True)
class Surroundings:
    """What a launch depends on beside the environment.

    `num_gpus` are those torch sees, `has_gpu_node` tells whether the machine shows any, `parent_command` is the command
    line of the parent process, `argv` this process's script with its arguments.
    """

    num_gpus: int = 0
    has_gpu_node: bool = False
    parent_command: tuple[str, ...] = ()
    argv: tuple[str, ...] = ("finetune.py",)


@dataclass(frozen=True)
class Launch:
    """How this process was started, from its environment and its surroundings.

    `command` is None unless accelerate started it. `num_gpus` are the visible ones; `device_type` is "cpu" where there
    are none, or where accelerate was told to use the CPU.
    """

    environ: Mapping[str, str]
    launcher: Launcher
    command: LaunchCommand | None
    argv: tuple[str, ...]
    device_type: DeviceType
    num_gpus: int

    def render_launch(self, num_processes: int) -> str:
        """Return the command that starts the same script on `num_processes` processes of one group."""
        return render_launch(num_processes, self.device_type, self.argv)


def read_launch(environ: Mapping[str, str], around: Surroundings) -> Launch:
    """Return how this process was started; nothing is judged yet."""
    launcher = _launcher(environ)
    command = None
    if launcher == "accelerate":
        command = read_launch_command(around.parent_command, around.argv, environ) or LaunchCommand()
    on_gpu = around.num_gpus > 0 and not is_true(environ.get("ACCELERATE_USE_CPU"))
    return Launch(environ, launcher, command, around.argv, "cuda" if on_gpu else "cpu", around.num_gpus)


def is_true(value: str | None) -> bool:
    """Whether an environment flag is on, by the words that accelerate takes for true."""
    return (value or "").strip().lower() in ("y", "yes", "t", "true", "on", "1")


def load_parent_command() -> tuple[str, ...]:
    """Read the words of the parent process's command line; empty where /proc does not tell."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ()
    return tuple(word.decode(errors="replace") for word in words[:-1])


def read_launch_command(
    parent_command: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
) -> LaunchCommand | None:
    """Return what `accelerate launch` was asked for, or None when the parent is not `accelerate launch`.

    `argv` is this process's script and its arguments: they end the parent's command line too and are not read as
    options of the launcher. accelerate takes each option with `_` or `-`, and with its value after a space or a `=`.
    """
    words = _launcher_words(parent_command, argv)
    if words is None:
        return None
    options = _read_options(words)
    file = _config_file(options, environ)
    settings = _load_settings(file) if file else {}
    num_processes, num_machines = (
        _integer(options[name] if name in options else settings.get(name)) for name in ("num_processes", "num_machines")
    )
    given_type = None if "multi_gpu" in options else settings.get("distributed_type")  # as accelerate reads it
    return LaunchCommand(
        config_file=str(file) if file else None,
        num_processes=num_processes,
        num_machines=num_machines,
        distributed_type=str(given_type) if given_type is not None else None,
        mixed_precision_option="mixed_precision" in options,
    )


def render_launch(num_processes: int | str, device_type: DeviceType, argv: Sequence[str]) -> str:
    """Return the command that starts `argv` on `num_processes` processes of one group, on GPUs or on the CPU."""
    script = shlex.join(argv)
    if device_type == "cpu":
        return f"accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes {num_processes} {script}"
    if num_processes == 1:
        return f"CUDA_VISIBLE_DEVICES=0 python {script}"
    return f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {num_processes} {script}"


def _launcher(environ: Mapping[str, str]) -> Launcher:
    if LAUNCHED_BY_TUNEBOOK in environ:
        return "tunebook"
    # accelerate always exports its dynamo settings (DeepSpeed's launcher excepted); users hardly set this one.
    if "ACCELERATE_DYNAMO_MODE" in environ or "ACCELERATE_CONFIG_DS_FIELDS" in environ:
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "python"


def _launcher_words(parent_command: Sequence[str], argv: Sequence[str]) -> list[str] | None:
    """Return what stands between `accelerate launch` and the script, or None for another parent."""
    words = list(parent_command)
    for ours in reversed(argv):
        if not words or words[-1] != ours:
            break
        words.pop()
    for index, word in enumerate(words):
        name = Path(word).name
        if name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return words[index + 2 :]
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return words[index + 1 :]
        if word == "accelerate.commands.accelerate_cli" and words[index + 1 : index + 2] == ["launch"]:
            return words[index + 2 :]
    return None


def _read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options by name with `_`; one without a value has "" or the word after it, which nobody reads."""
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            options[name.replace("-", "_")] = value if is_joined else following
    return options


def _config_file(options: Mapping[str, str], environ: Mapping[str, str]) -> Path | None:
    """Return the file accelerate took values from: the one named, else the default one unless `--cpu` was given."""
    if "config_file" in options:
        return Path(options["config_file"])
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = environ.get("HF_HOME", str(Path(cache) / "huggingface"))
    default = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return default if "cpu" not in options and default.is_file() else None


def _load_settings(file: Path) -> dict[str, Any]:
    """Read an accelerate config; a file that cannot be read says nothing, since accelerate has accepted it already."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        settings = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _integer(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None
