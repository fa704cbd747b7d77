"""`tunebook generate`: a line for each prompt, in order, the same whatever the batch, and nothing where one is bad."""

import json

import pytest

from finished_runs import finished_place
from tunebook.errors import Refused
from tunebook.export.finished import open_finished
from tunebook.using.generate import Drawing, check_drawing, generate
from tunebook.using.trained import load_trained

pytestmark = pytest.mark.slow

RUN = "runs/recipe"
QUESTIONS = ["red", "blue cat " * 30, "dog house water", "cat", "house " * 12, "What is 你好?", "a b c d e f"]


@pytest.fixture
def place(monkeypatch):
    monkeypatch.chdir(finished_place())
    return finished_place()


def answered(folder, prompts, **drawing):
    out = folder / "answers.jsonl"
    generate(RUN, str(prompts), str(out), Drawing(**{"max_new_tokens": 12, **drawing}))
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_come_in_order_and_do_not_depend_on_the_batch(place, tmp_path, capsys):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": question} for question in QUESTIONS])
    rows = answered(tmp_path, prompts, batch_size=3)
    assert [row["prompt"] for row in rows] == QUESTIONS
    assert len({row["answer"] for row in rows}) > 3
    assert rows == answered(tmp_path, prompts, batch_size=1) == answered(tmp_path, prompts, batch_size=50)
    for row in rows:
        assert set(row) == {"prompt", "answer", "finish_reason", "prompt_tokens", "answer_tokens"}
        assert row["finish_reason"] == ("length" if row["answer_tokens"] == 12 else "stop")
        assert row["prompt_tokens"] > 20
    assert "7 answers" in capsys.readouterr().out
    # By transformers' own generation, for one prompt without padding.
    trained = load_trained(open_finished(RUN))
    text = trained.prompts.source  # the Alpaca text, with and without input; the second is this one's
    start = text.rindex("Below is")
    prompt = text[start:].format(instruction=QUESTIONS[2])
    inputs = trained.tokenizer(prompt, return_tensors="pt")
    made = trained.model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert trained.tokenizer.decode(made, skip_special_tokens=True) == rows[2]["answer"]
    assert inputs.input_ids.shape[1] == rows[2]["prompt_tokens"]


def test_drawn_answers_are_those_of_seed_and_row(place, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"instruction": question} for question in QUESTIONS[:4]])
    drawn = answered(tmp_path, prompts, temperature=1.5, seed=1)
    assert drawn == answered(tmp_path, prompts, temperature=1.5, seed=1, batch_size=1)
    assert drawn != answered(tmp_path, prompts, temperature=1.5, seed=2)
    assert drawn != answered(tmp_path, prompts)


def test_nothing_is_written_where_a_prompt_is_bad(place, tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook.using.generate.load_trained", lambda finished: pytest.fail("weights are loaded"))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"prompt": "fine"}, {"prompt": turns}, {"prompt": "word " * 3000}]
    prompts = write(tmp_path / "prompts.jsonl", rows)
    with pytest.raises(Refused) as refused:
        answered(tmp_path, prompts)
    text = refused.value.render()
    assert f"{prompts}:2: the Alpaca text has one question and one answer; this row has 4 turns" in text
    assert f"{prompts}:3: the prompt has " in text and "and the model reads 2048" in text
    assert f"{prompts}: 2 of 3 prompts can't be used" in text
    for run, out, reason in (
        ("runs/none", tmp_path / "answers.jsonl", "no run_summary"),
        (RUN, prompts, "is what is read"),
        (RUN, tmp_path, "is a folder"),
    ):
        with pytest.raises(Refused, match=reason):
            generate(run, str(prompts), str(out), Drawing())
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("drawing", "is_seed_given", "reason"),
    [
        (Drawing(temperature=float("nan")), False, "--temperature is nan"),
        (Drawing(temperature=float("inf")), False, "--temperature is inf"),
        (Drawing(temperature=-1.0), False, "--temperature is -1"),
        (Drawing(seed=3), True, "--seed is for drawing"),
    ],
)
def test_settings_that_draw_nothing_are_refused(drawing, is_seed_given, reason):
    with pytest.raises(Refused, match=reason):
        check_drawing(drawing, is_seed_given)
    check_drawing(Drawing(temperature=0.7, seed=3), True)
