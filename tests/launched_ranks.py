"""Starting real launchers from a clean environment, and a script that starts them in the process."""

import json
import os
import subprocess
import sys

LAUNCHER = """
import json, sys
from pathlib import Path
from tunebook.launching.launch import launch

folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
codes = {}
for script, arguments, size in runs:
    print(f"-- {arguments[0]}", file=sys.stderr, flush=True)
    codes[arguments[0]] = launch(folder / script, [str(folder), *arguments], size)
(folder / "codes.json").write_text(json.dumps(codes))
sys.exit(codes[arguments[0]])
"""


def clean_environ():
    """The environment of this process without what a launcher or the user's accelerate would add."""
    starts = ("ACCELERATE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(starts) and name not in names}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def run(command, environ):
    done = subprocess.run(
        [str(word) for word in command], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def launch_in_process(folder, runs, environ):
    """Run `launch` for each (script in `folder`, arguments, processes), one after the other in one process."""
    file = folder / "launcher.py"
    file.write_text(LAUNCHER)
    return run([sys.executable, file, folder, json.dumps(runs)], environ)
