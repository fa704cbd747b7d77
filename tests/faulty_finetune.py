"""finetune.py with the fault that FAULT names, for launchers that start a file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from finetune import finetune

from fork_server import inject_faults
from tunebook.launching.entry import run_rank

if __name__ == "__main__":
    inject_faults()
    run_rank(finetune)
