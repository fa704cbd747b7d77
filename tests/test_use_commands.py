"""chat, generate and eval as they are typed: their words, and the one line they refuse with."""

import io
import sys

import pytest

from tunebook.commands import cli
from tunebook.using.evaluate import Evaluation
from tunebook.using.generate import Drawing

REFUSED = [
    (["chat", "runs/none"], "runs/none: no run_summary.json there"),
    (["chat"], "Missing argument"),
    (["chat", "runs/none", "--max-new-tokens", "0"], "--max-new-tokens"),
    (["generate", "runs/none", "--prompts", "p.txt", "--out", "o.jsonl"], "runs/none: no run_summary.json there"),
    (["generate", "runs/none", "--prompts", "p.txt"], "--out"),
    (["generate", "runs/none", "--prompts", "p", "--out", "o", "--batch-size", "0"], "--batch-size"),
    (["generate", "runs/none", "--prompts", "p", "--out", "o", "--temperature", "inf"], "--temperature is inf"),
    (["generate", "runs/none", "--prompts", "p", "--out", "o", "--seed", "1"], "--seed is for drawing answers"),
    (["eval", "runs/none"], "runs/none: no run_summary.json there"),
    (["eval", "runs/none", "--num-processes", "0"], "--num-processes"),
    (["eval", "runs/none", "--answer-rows", "-1"], "--answer-rows"),
]


def type_words(monkeypatch, capsys, words, typed=b""):
    monkeypatch.setattr(sys, "argv", ["tunebook", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "reason"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    code, said = type_words(monkeypatch, capsys, words)
    assert code == 2
    assert said.err.startswith("refused: ") and reason in said.err
    assert said.err.count("\n") == 1 and said.out == ""
    assert not list(tmp_path.iterdir())


def test_the_words_mean_what_they_say(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("tunebook.using.generate.generate", lambda *given: calls.append(given))
    monkeypatch.setattr("tunebook.using.evaluate.measure_here", lambda *given: calls.append(given))
    monkeypatch.setattr("tunebook.launching.launch.launch_words", lambda *given: calls.append(given) or 75)
    words = ["generate", "runs/x", "--prompts", "p", "--out", "o", "--batch-size", "3", "--max-new-tokens", "9"]
    assert type_words(monkeypatch, capsys, [*words, "--temperature", "0.5", "--seed", "7"])[0] == 0
    assert type_words(monkeypatch, capsys, [*words[:6], "--base", "b"])[0] == 0
    assert calls == [("runs/x", "p", "o", Drawing(3, 9, 0.5, 7), None), ("runs/x", "p", "o", Drawing(), "b")]
    calls.clear()
    assert type_words(monkeypatch, capsys, ["eval", "runs/x", "--no-before", "--out", "o", "--data", "d"])[0] == 0
    assert calls == [("runs/x", Evaluation("d", False, "o"))]
    calls.clear()
    # On several processes each is asked for the same, and the command ends with their code.
    assert type_words(monkeypatch, capsys, ["eval", "runs/x", "--num-processes", "3", "--base", "b"])[0] == 75
    assert calls == [(["-m", "tunebook.commands.cli", "eval", "runs/x", "--base", "b", "--max-new-tokens", "256"], 3)]


def test_a_process_of_a_launch_measures_its_share(monkeypatch, capsys):
    calls = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("tunebook.using.evaluate.measure_as_rank", lambda *given: calls.append(given))
    assert type_words(monkeypatch, capsys, ["eval", "runs/x", "--num-processes", "3"])[0] == 0
    assert calls == [("runs/x", Evaluation())]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 1)])
def test_chat_ends_without_a_trace(monkeypatch, capsys, error, code):
    def end(*given, **named):
        raise error

    monkeypatch.setattr("tunebook.using.chat.chat", end)
    monkeypatch.setattr("tunebook.commands.use.drop_output", lambda: None)
    ended, said = type_words(monkeypatch, capsys, ["chat", "runs/x"])
    assert (ended, said.err) == (code, "")


class OutOfMemoryError(RuntimeError):
    """As torch's own of that name."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"),
    ],
    ids=["python", "cpu", "cuda"],
)
def test_memory_that_runs_out_is_one_line(monkeypatch, capsys, error):
    def end(*given, **named):
        raise error

    monkeypatch.setattr("tunebook.using.chat.chat", end)
    monkeypatch.setattr("tunebook.merge.merge.merge", end)
    for words in (["chat", "runs/x"], ["merge", "runs/x", "--out", "o"]):
        ended, said = type_words(monkeypatch, capsys, words)
        assert ended == 1 and said.err.startswith("failed: ") and said.err.count("\n") == 1
        assert "memory" in said.err


def test_any_bytes_can_be_asked(monkeypatch, capsys):
    heard = []
    monkeypatch.setattr("tunebook.using.chat.chat", lambda run, **named: heard.extend(sys.stdin))
    type_words(monkeypatch, capsys, ["chat", "runs/x"], "caf\u00e9 \u4f60\n".encode() + b"caf\xe9\n")
    assert heard == ["caf\u00e9 \u4f60\n", "caf\ufffd\n"]
