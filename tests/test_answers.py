"""Greedy answers: what the weights say, in order, whatever the batch, the mode and the base's own settings."""

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from tiny_training import STOP, TinyExample, build_base, build_data, build_recipe, plan_of
from tunebook.launching.world import World
from tunebook.model.model import build_model
from tunebook.training import answers, decoding, outcome
from tunebook.training.answers import ANSWER_MARGIN_TOKENS, greedy_answers, num_exact_matches

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(build_base(tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model whose adapter was moved so far that answers differ from prompt to prompt."""
    recipe = build_recipe(tokenizer.name_or_path)
    model = build_model(recipe, plan_of(recipe, World(), build_data(), "runs/tiny"), World(), tokenizer)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def argmax_answer(model, prompt_ids, num_tokens) -> list[int]:
    """Return the most likely tokens one by one, without cache, batch or padding."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == STOP:
            break
    return ids[len(prompt_ids) :]


def test_a_batch_of_unequal_prompts_is_answered_as_each_prompt_alone(model, tokenizer, monkeypatch):
    monkeypatch.setattr(answers, "ANSWER_BATCH_SIZE", 4)
    data = build_data(num_rows=1, num_eval_rows=10, num_examples=10)
    length = 3 + ANSWER_MARGIN_TOKENS
    model.eval()
    expected = [argmax_answer(model, example.prompt_ids, length) for example in data.examples]
    texts = [tokenizer.decode(ids).removesuffix("<|end|>") for ids in expected]
    assert len(set(texts)) > 5
    assert greedy_answers(model, tokenizer, data, World(), "float32") == texts
    assert greedy_answers(model.get_base_model(), tokenizer, data, World(), "float32") == texts


def test_answers_take_no_more_positions_than_they_may(model, tokenizer, monkeypatch):
    data, room, taken = build_data(num_rows=1, num_eval_rows=10, num_examples=10), 3 + ANSWER_MARGIN_TOKENS, []

    def write_batch(model, tokenizer, prompts, *more):
        taken.append((len(prompts), max(map(len, prompts))))
        return decoding.write_batch(model, tokenizer, prompts, *more)

    monkeypatch.setattr(answers, "write_batch", write_batch)
    texts = greedy_answers(model, tokenizer, data, World(), "float32")
    assert [rows for rows, _ in taken] == [10]
    taken.clear()
    assert greedy_answers(model, tokenizer, data, World(), "float32", most_positions=90) == texts
    assert sum(rows for rows, _ in taken) == 10 and max(rows for rows, _ in taken) > 1
    assert all(rows * (longest + room) <= 90 for rows, longest in taken)
    taken.clear()
    greedy_answers(model, tokenizer, data, World(), "float32", most_positions=1)
    assert [rows for rows, _ in taken] == [1] * 10, "each alone, for want of less"


def test_a_run_answers_within_the_positions_of_its_micro_batch(monkeypatch):
    given = {}
    monkeypatch.setattr(outcome, "greedy_answers", lambda *words, **named: given.update(named) or [])
    plan = SimpleNamespace(per_device_train_batch_size=3, max_length=50, compute_dtype="float32")
    run = SimpleNamespace(plan=plan, tokenizer=None, data=None, world=World())
    outcome.answer_held_out(SimpleNamespace(model=None, vote=None), run)
    assert given == {"most_positions": 150}


def test_an_answer_ends_at_the_stop_token(model, tokenizer):
    data = build_data(num_rows=1, num_eval_rows=4, num_examples=4)
    first = argmax_answer(model.eval(), data.examples[0].prompt_ids, 6)
    stopping = type(data)(None, None, data.examples, stop_token_id=first[2])
    texts = greedy_answers(model, tokenizer, stopping, World(), "float32")
    assert texts[0] == tokenizer.decode(first[: first.index(first[2])])


def test_the_model_is_left_as_it_was_found_and_its_own_settings_are_not_used(model, tokenizer):
    data = build_data(num_rows=1, num_eval_rows=4, num_examples=4)
    plain = greedy_answers(model, tokenizer, data, World(), "float32")
    settings = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0, max_new_tokens=1)
    base = model.get_base_model()
    before, base.generation_config = base.generation_config, settings
    try:
        model.train()
        assert greedy_answers(model, tokenizer, data, World(), "float32") == plain
        assert base.generation_config is settings and model.training
        model.eval()
        greedy_answers(model, tokenizer, data, World(), "float32")
        assert not model.training
    finally:
        base.generation_config = before


def test_no_examples_no_answers(model, tokenizer):
    assert greedy_answers(model, tokenizer, build_data(1, 1, 0), World(), "float32") == []


def test_two_hundred_answers_take_seconds(model, tokenizer, capfd):
    data = build_data(num_rows=1, num_eval_rows=200, num_examples=200)
    began = time.monotonic()
    assert len(greedy_answers(model, tokenizer, data, World(), "float32")) == 200
    assert time.monotonic() - began < 20
    assert capfd.readouterr() == ("", "")


def test_an_exact_match_is_the_same_text_but_for_white_space_around_it():
    examples = [TinyExample("", [], text) for text in ("yes", "yes", "yes", "two words", "")]
    assert num_exact_matches(examples, ["yes", " yes\n", "Yes", "two  words", " "]) == 3
