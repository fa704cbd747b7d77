"""Settings that must hold before torch is imported: one thread a process, no telemetry, no Hub."""

import os

# Unpinned threads made small CPU work up to 20 times slower on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
