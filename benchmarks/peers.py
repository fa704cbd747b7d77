"""The virtual environments of the programs that tunebook is measured against, pinned, beside this script.

Each sees the packages of the environment that runs the benchmark and holds what it needs in other versions; nothing of
it comes near that environment. A peer that does not install is left out, and its reason is kept.
"""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parent / ".venvs"
TORCH = "torch==2.13.0"
INSTALL_SECONDS = 600


@dataclass(frozen=True)
class Peer:
    """What an environment holds: `words` for pip, packages taken out again, and empty modules in their place."""

    words: tuple[str, ...]
    module: str
    removed: tuple[str, ...] = ()
    empty_modules: tuple[str, ...] = ()


PEERS = {
    "trl": Peer(("--no-deps", "trl==1.16.0"), "trl.scripts.sft"),
    "lightning": Peer((TORCH, "lightning==2.6.6"), "lightning.pytorch"),
    # Its torchvision and torchaudio are built for other versions of torch, and it never hears a sound here.
    "llamafactory": Peer(
        (TORCH, "llamafactory==0.9.5", "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "datasets==4.0.0"),
        "llamafactory.train.tuner",
        removed=("torchvision", "torchaudio"),
        empty_modules=("torchaudio",),
    ),
}
# What else was tried, and what became of it.
NOT_TO_BE_HAD = {
    "axolotl 0.19.0": "installs (5 minutes, 3 GB), and ends while it loads the model: in a world of several processes "
    "it puts each one's model on the GPU of its number, whatever device_map says, and there is none",
}


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return ENVIRONMENTS / name / "bin" / "python"


def install(name: str) -> str | None:
    """Make a peer's environment where it is not there yet; return why it can't be had, or None."""
    peer, folder = PEERS[name], ENVIRONMENTS / name
    installed = folder / "installed"
    if installed.is_file() and installed.read_text(encoding="utf-8") == repr(peer):
        return None
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = (str(python_of(name)), "-m", "pip", "--quiet", "--disable-pip-version-check")
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        (packages / "benchmark.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        _run(*pip, "install", "--prefer-binary", *peer.words)
        if peer.removed:
            _run(*pip, "uninstall", "--yes", *peer.removed)
        for module in peer.empty_modules:
            (packages / f"{module}.py").touch()
        _run(str(python_of(name)), "-c", f"import {peer.module}")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return f"{error.__class__.__name__}: {said[-1] if said else error}"
    installed.write_text(repr(peer), encoding="utf-8")
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_SECONDS)
