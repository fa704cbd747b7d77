"""The vote on stopping: no rank waits for one that is gone longer than the recipe says."""

import multiprocessing
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
from torch import distributed

from tunebook.training.stopping import StopVote

pytestmark = pytest.mark.slow
TIMEOUT = 2


def vote_alone(rank, store, told):
    """Be one of two ranks of which rank 1 stays out of the vote; rank 0 tells how long it waited, and what it got."""
    groups = distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", store=groups, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    with patch.object(distributed, "get_backend", lambda: "nccl"):  # as on GPUs: the vote has a group of its own
        vote = StopVote(TIMEOUT)
    if rank == 1:
        time.sleep(60)
    began = time.monotonic()
    try:
        vote.agree()
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    told.put((time.monotonic() - began, error))


def test_a_vote_that_a_rank_stays_away_from_ends_within_the_recipes_timeout(tmp_path):
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    ranks = [fork.Process(target=vote_alone, args=(rank, str(tmp_path / "store"), told)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        seconds, error = told.get(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert TIMEOUT - 1 < seconds < TIMEOUT + 10 and error
