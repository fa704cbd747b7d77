"""A Hub that does not answer is one line, however often huggingface_hub tries."""

import logging

import pytest

import tunebook.data  # noqa: F401  as every command that reads a model or data does
from tunebook.system.quiet import hub_asked

REQUESTS = logging.getLogger("huggingface_hub.utils._http")
[HANDLER] = [one for one in REQUESTS.handlers if type(one).__name__ == "OneWordOnTheHub"]


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(HANDLER, "said", False)


def fail_often():
    for wait in (1, 2, 4, 8, 8):
        REQUESTS.warning("'[Errno -3] no name' thrown while requesting HEAD https://host/org/m")
        REQUESTS.warning(f"Retrying in {wait}s [Retry 1/5].")


def test_one_line_for_all_attempts(capsys):
    fail_often()
    fail_often()
    assert capsys.readouterr().err == (
        "the Hub: it does not answer ('[Errno -3] no name'); trying again, for a minute at most\n"
    )


def test_what_else_it_says_is_said(capsys):
    fail_often()
    REQUESTS.warning("Rate limited. Waiting 200.0s before retry [Retry 1/5].")
    REQUESTS.warning("this endpoint is old")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "the Hub: Rate limited. Waiting 200.0s before retry [Retry 1/5].",
        "the Hub: this endpoint is old",
    ]


def test_what_the_hub_is_asked_for_and_for_how_long_is_said_there_alone(capsys):
    fail_often()
    with hub_asked("for the licence of org/m", "10 seconds"):
        fail_often()
    fail_often()
    why = "'[Errno -3] no name'"
    assert capsys.readouterr().err.splitlines() == [
        f"the Hub: it does not answer ({why}); trying again, for a minute at most",
        f"the Hub, asked for the licence of org/m: it does not answer ({why}); trying again, for 10 seconds at most",
    ]


def test_rank_0_speaks_for_all(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    fail_often()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_these_are_the_words_of_huggingface_hub(capsys, monkeypatch):
    from huggingface_hub.utils import _http

    assert _http.logger is REQUESTS
    monkeypatch.setattr(_http.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    with pytest.raises(Exception, match="refused"):
        _http.http_backoff("HEAD", "http://127.0.0.1:9/m")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("the Hub: it does not answer (") and "refused" in line
