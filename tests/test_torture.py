"""A few kills at random instants, on every test run; `make torture` makes a hundred."""

import pytest

from torture import check, render, torture

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_nothing_is_lost_to_a_few_kills(tmp_path):
    tally = torture(tmp_path, kills=4, seed=0, most_kills_of_a_run=2)
    print(render(tally))
    assert tally.kills >= 4 and tally.runs >= 2 and tally.lives >= 6
    check(tally)
