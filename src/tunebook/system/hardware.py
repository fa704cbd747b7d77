"""What kind of device a run computes on, by the name that its maker gave it; never the name of a machine."""

import platform
from pathlib import Path


def name_hardware(device_type: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the kind of the GPU, such as `NVIDIA H200`, or of the processor where there is none.

    Where the system doesn't tell the processor's name, its architecture (`x86_64`) is all that is known.
    """
    if device_type == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.machine() or "unknown")
