"""A copy of what a user runs, in a folder of the test's own, and commands typed there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
COPIED = ("finetune.py", "train_ddp.py", "README.md", "Makefile", "recipes", "accelerate_configs", "assets", "data")


def make_checkout(folder: Path) -> Path:
    """Copy the files that commands of the README name; the package itself stays the installed one."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    return folder


def type_command(command: str, folder: Path, timeout: float = 600, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in `folder` with the test's own Python first on PATH, one thread, and no GPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    cache = {"TUNEBOOK_CACHE": str(folder / "cache")}
    # Under `make test` a make typed here would be one that make started, and say so in its output.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**inherited, **settings, **cache, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
