"""One item ahead: results in order, two at most, errors where they belong."""

import threading

import pytest

from tunebook.data.ahead import one_ahead


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_results_come_in_order(number):
    assert list(one_ahead(lambda item: item * item, range(number))) == [item * item for item in range(number)]


def test_the_next_item_is_worked_on_while_one_is_used():
    started = {number: threading.Event() for number in range(4)}

    def work(number):
        started[number].set()
        return number

    for number in one_ahead(work, range(4)):
        if number < 3:
            assert started[number + 1].wait(10), "nothing runs while this one is used"
        if number < 2:
            assert not started[number + 2].is_set(), "more than one ahead"


def test_items_are_read_in_the_callers_thread():
    threads = []

    def items():
        for number in range(3):
            threads.append(threading.current_thread())
            yield number

    workers = set(one_ahead(lambda item: threading.current_thread(), items()))
    assert set(threads) == {threading.main_thread()} and len(workers) == 1 and threading.main_thread() not in workers


@pytest.mark.parametrize("fails", [0, 2])
def test_an_error_of_the_work_comes_in_its_place_and_ends_the_thread(fails):
    seen = []
    with pytest.raises(ZeroDivisionError):
        for result in one_ahead(lambda item: 1 / (item - fails), range(5)):
            seen.append(result)
    assert len(seen) == fails
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("one-ahead")]
