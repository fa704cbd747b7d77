"""Where the usual account of DDP is wrong, shown with plain torch and two processes (docs/ddp.md)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [str(Path(__file__).parent / "ddp_claims.py"), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_step_never_synchronises_so_replicas_part_when_the_last_backward_is_inside_no_sync(ranks):
    for rank in ranks:
        assert rank["apart when synced"] == 0.0
        assert rank["apart when not"] > 1e-2, "two steps of Adam at 1e-2 in different directions, and no error"


def test_the_average_of_per_rank_means_is_not_the_mean_over_labels(ranks):
    for rank in ranks:
        assert rank["means"]["mean of means"] > 0.05
        assert rank["means"]["sum by the number of all"] < 1e-6


def test_buckets_are_reduced_while_backward_still_runs(ranks):
    for rank in ranks:
        events = rank["events"]
        assert events.count("bucket") > 1 and events[-1] == "backward returned"
        gradients = [event for event in events if event.startswith("gradient")]
        assert gradients == [f"gradient {number}" for number in reversed(range(8))]
        assert events.index("bucket") < events.index("gradient 0"), "the first left before the last gradient was there"
