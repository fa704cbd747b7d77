"""Talking with the model of a finished run: turns, commands, the base beside it, and what does not fit."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import training_scenarios
from finished_runs import finished_place
from tiny_training import build_base, build_data
from tunebook.data.conversation import Message
from tunebook.export.finished import Finished, open_finished
from tunebook.launching.process_group import process_group
from tunebook.launching.world import World
from tunebook.model.adapter import adapter_tensors, tensor_sha256
from tunebook.training.run import train
from tunebook.using.chat import ONE_BY_ONE, Talk, chat
from tunebook.using.trained import before_training, load_trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[{"r": 4}, None], ids=["adapter", "whole model"])
def finished(request, tmp_path_factory):
    """A run of a model with 128 positions and a chat template: each turn ends with <|end|>, tokens are bytes."""
    folder = tmp_path_factory.mktemp("chat")
    build_base(folder / "base")
    with process_group(World()):
        data = build_data(num_examples=2)
        run = training_scenarios.run_of(
            folder, World(), "run", data, max_steps=2, lora=request.param, learning_rate=0.05
        )
        result = train(run)
    summary = {"adapter_sha256": result.summary.adapter_sha256}
    return Finished(Path(run.plan.run_dir), run.recipe, summary, run.plan)


@pytest.fixture
def talk(finished):
    return Talk(finished, load_trained(finished), 6)


def prompt_of(talk):
    return talk._trained.tokenizer.decode(talk._asked)


def answer_of(model, prompt_ids, num_tokens=6):
    import torch

    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + num_tokens:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in (256, 257):
            break
    return [token for token in ids[len(prompt_ids) :] if token not in (256, 257)]


def test_the_model_that_answers_is_the_trained_one(finished, monkeypatch, capsys):
    trained = load_trained(finished)
    assert tensor_sha256(adapter_tensors(trained.model)) == finished.summary["adapter_sha256"]
    monkeypatch.setattr("tunebook.using.chat.open_finished", lambda *given: finished)
    chat("runs/run", ["Hello", "/nothing", " \n", "never asked"], max_new_tokens=5)
    said = capsys.readouterr()
    [prompt] = [trained.tokenizer.encode("Hello<|end|>", add_special_tokens=False)]
    expected = trained.tokenizer.decode(answer_of(trained.model, prompt, 5))
    assert said.out == f"{expected}\n"
    assert "There is no /nothing." in said.err and "/reset" in said.err


def test_a_question_is_asked_after_the_turns_before_it(talk, monkeypatch, capsys):
    monkeypatch.setattr(talk, "_write", lambda model, ids, show: ("Hi <|end|>", True))
    talk.hear("Hello")
    talk.hear("And you?")
    # What looks like a control token in a turn is plain text, as in training.
    assert prompt_of(talk) == "Hello<|end|>Hi <|end|><|end|>And you?<|end|>"
    assert talk._asked.count(257) == 3
    talk.hear("/reset")
    talk.hear("/base")
    assert capsys.readouterr().err == "The conversation is forgotten.\nThere is no question yet.\n"
    talk.hear("/etc is a folder?")
    assert prompt_of(talk) == "/etc is a folder?<|end|>"
    monkeypatch.setattr(talk, "_write", lambda model, ids, show: (" ", True))
    talk.hear("Say nothing.")
    assert talk.turns[-1] == Message("assistant", "Hi <|end|>"), "an answer of blanks leaves no turn"


def test_the_oldest_turns_make_room(talk, monkeypatch, capsys):
    monkeypatch.setattr(talk, "_write", lambda model, ids, show: ("b" * 20, True))
    for number in range(4):
        talk.hear(f"{number}" * 20)
    assert "oldest" in capsys.readouterr().err
    # 128 positions, 6 of them for the answer: 42 a turn and its answer, 21 for the question.
    assert prompt_of(talk).startswith("1" * 20) and prompt_of(talk).endswith("3" * 20 + "<|end|>")
    assert len(talk._asked) + 6 <= 128
    talk.hear("c" * 125)
    said = capsys.readouterr().err
    assert "the oldest 3 turns are left out, the model reads 128 tokens" in said
    assert talk._room(talk._asked) == 2
    talk.hear("d" * 127)
    assert "This question has 128 tokens with its prompt, and the model reads 128." in capsys.readouterr().err
    assert prompt_of(talk) == "c" * 125 + "<|end|>"


def test_base_shows_what_the_base_would_have_said(finished, talk, capsys):
    talk.hear("Hello")
    [given] = capsys.readouterr().out.splitlines()
    talk.hear("/base")
    shown = capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(finished.recipe.model.name_or_path).eval()
    expected = talk._trained.tokenizer.decode(answer_of(base, talk._asked))
    with before_training(talk._trained, finished) as model:
        written, _ = talk._write(model, talk._asked, lambda text: None)
    assert written == expected != given
    first = shown.splitlines()[0]
    assert first.index("trained") < first.index("base")
    assert talk._answered == given and len(talk.turns) == 2, "a comparison is no turn"


def test_ctrl_c_stops_the_answer_only(talk, monkeypatch, capsys):
    def show(text):
        if len(pieces) == 2:
            raise KeyboardInterrupt
        pieces.append(text)

    pieces = []
    monkeypatch.setattr("tunebook.using.chat.show_piece", show)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    talk.hear("Hello")
    assert "(stopped)" in capsys.readouterr().err
    assert talk.turns[1].content.startswith("".join(pieces)) and len(talk.turns) == 2
    assert not talk._trained.model.training
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(KeyboardInterrupt):  # in a script it ends the script
        talk.hear("Hello")


def test_the_alpaca_text_has_no_turns_and_that_is_said_once(monkeypatch, capsys):
    monkeypatch.chdir(finished_place())
    trained = load_trained(open_finished("runs/recipe"))
    talk = Talk(open_finished("runs/recipe"), trained, 4)
    for question in ("red blue", "cat dog", "house water"):
        talk.hear(question)
        assert f"### Instruction:\n{question}\n\n### Response:" in prompt_of(talk)
        assert prompt_of(talk).count("### Instruction:") == 1
    assert capsys.readouterr().err.count(ONE_BY_ONE) == 1
