"""Settings that must hold before torch is imported: one thread a process, no telemetry, no Hub."""

import os
import signal

# Unpinned threads made small CPU work up to 20 times slower on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_ignore_collect(collection_path, config):
    """Leave out files that are slow as a whole when slow tests are: importing them would import torch."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        text = collection_path.read_text(encoding="utf-8")
        return any(f"pytestmark = {start}pytest.mark.slow" in text for start in ("", "[")) or None
    return None


# A suite that runs in the background, or under nohup, was told to ignore these, and so would be what it starts.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
