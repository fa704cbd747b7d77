"""`tunebook doctor`: what is installed and seen here, what of it misbehaves, and whether processes form a group."""

import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from tunebook import __version__
from tunebook.commands.group_trial import Trial, try_group
from tunebook.errors import EXIT_DONE, EXIT_FAILED
from tunebook.launching.world import count_gpus, look_around
from tunebook.plan.table import build_console

GIB = 1024**3
# Installed beside what setup.cfg asks for, and worth knowing: they change how a run behaves or what it can do.
WORTH_KNOWING = ("flash-attn", "liger-kernel", "deepspeed", "trl", "hf_xet", "kernels")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `bad` would stop a run or make it wrong; `know` asks for nothing."""

    kind: Literal["ok", "know", "bad"]
    what: str
    text: str


def examine(num_processes: int, time_limit: float) -> int:
    """Print the report and return the exit code: 0, or 1 where something found is bad."""
    console = build_console()
    findings = []

    def show(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            style = {"ok": "", "know": "yellow", "bad": "red"}[finding.kind]
            line = f"{finding.kind:<5}{finding.what:<17}{finding.text}"
            console.print(line, style=style, soft_wrap=True, markup=False)

    console.print(f"tunebook {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    show(find_versions())
    show(find_machine())
    show(find_known_bad())
    backends = ["gloo", *(["nccl"] if count_gpus() > 1 else [])]
    for backend in backends:
        size = num_processes if backend == "gloo" else min(num_processes, count_gpus())
        show([tell_trial(try_group(size, backend, time_limit))])
    bad = sum(finding.kind == "bad" for finding in findings)
    console.print(f"{bad} of {len(findings)} findings are bad" if bad else "nothing found that would stop a run")
    return EXIT_FAILED if bad else EXIT_DONE


def find_versions() -> list[Finding]:
    """Return each package that tunebook asks for with the version that is installed, and whether it is one it takes."""
    from packaging.requirements import Requirement

    found = []
    for text in requires("tunebook") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{wanted.name}{wanted.specifier}'"
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            found.append(Finding("bad", wanted.name, f"is not installed: {fix}"))
            continue
        fits = wanted.specifier.contains(there, prereleases=True)
        told = there if fits else f"{there}, expected {wanted.specifier}: {fix}"
        found.append(Finding("ok" if fits else "bad", wanted.name, told))
    for name in WORTH_KNOWING:
        try:
            found.append(Finding("ok", name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def find_machine() -> list[Finding]:
    """Return processors, memory, disk, GPUs and the backends that torch was built with."""
    import torch

    free = shutil.disk_usage(Path.cwd()).free / GIB
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    found = [
        Finding("ok", "processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable"),
        Finding("ok", "memory", f"{memory:.0f} GiB, here {free:.0f} GiB of disk are free"),
    ]
    for number in range(count_gpus()):
        gpu = torch.cuda.get_device_properties(number)
        with torch.cuda.device(number):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        told = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        found.append(Finding("ok", f"GPU {number}", told + ("" if has_bf16 else ", no bfloat16: model.dtype: float16")))
    if not count_gpus():
        found.append(Finding("ok", "GPUs", "none: runs are on the CPU"))
    built = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    found.append(Finding("ok", "backends", ", ".join(built) or "none"))
    return found


def find_known_bad(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what is known to go wrong with these versions on this machine, and what is done about it."""
    around = look_around(environ)
    found = []
    if around.has_gpu_node and not around.num_gpus and "CUDA_VISIBLE_DEVICES" not in environ:
        text = "the machine shows a GPU that torch cannot use: is this a CPU build of torch?"
        found.append(Finding("bad", "torch", text))
    if around.num_gpus < 2:
        text = "with fewer than two GPUs `accelerate launch --num_processes N` starts ONE process and says nothing: "
        text += "use --config_file accelerate_configs/cpu.yaml, torchrun or tunebook launch"
        found.append(Finding("know", "accelerate", text))
    if has_avx512_bf16():
        text = "bitsandbytes 0.50 repacks 4-bit weights in eval mode on CPUs with AVX512-BF16, as this one, and the "
        text += "packed form has no gradient: guarded, tunebook keeps the weights as they are"
        found.append(Finding("know", "bitsandbytes", text))
    if (precision := environ.get("ACCELERATE_MIXED_PRECISION", "no")) != "no":
        text = f"ACCELERATE_MIXED_PRECISION={precision} is set: a recipe whose model.dtype says otherwise is refused"
        found.append(Finding("know", "environment", text))
    if not around.num_gpus and "OMP_NUM_THREADS" not in environ:
        text = "OMP_NUM_THREADS is not set: one process takes all cores, which made small models several times slower"
        found.append(Finding("know", "environment", text))
    return found


def has_avx512_bf16(place: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor computes in bfloat16 itself, as far as /proc tells."""
    try:
        return " avx512_bf16" in place.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def tell_trial(trial: Trial) -> Finding:
    """Return what came of forming a group."""
    what = f"{trial.backend} group"
    if trial.failure:
        return Finding("bad", what, f"{trial.num_processes} processes formed none here: {trial.failure}")
    text = f"{trial.num_processes} processes of this machine formed one and added up in {trial.seconds:.1f} s"
    return Finding("ok", what, text)
