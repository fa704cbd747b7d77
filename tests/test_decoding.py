"""Answers in batches: each prompt's own, whatever it shares the batch with."""

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from tunebook.training.decoding import (
    Limits,
    SeededSampling,
    answering,
    batches_by_length,
    limits_of,
    stop_ids,
    write_batch,
)
from tunebook.using.streaming import ShownAnswer, without_controls

pytestmark = pytest.mark.slow

NUM_TOKENS, POSITIONS = 300, 64
STOPS = list(range(7, 27))


class Tokens:
    """What decoding asks of a tokenizer: a pad token that is a token of the prompts, too."""

    pad_token_id, eos_token_id = 3, 12


def build(kind):
    torch.manual_seed(0)
    shape = {"vocab_size": NUM_TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    if kind == "qwen2":  # positions by rotation
        made = {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
        model = Qwen2ForCausalLM(Qwen2Config(**shape, **made))
    else:  # positions looked up, where one too many is an error
        model = GPT2LMHeadModel(GPT2Config(**shape, n_positions=POSITIONS, bos_token_id=0, eos_token_id=12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def ragged_prompts():
    draw = torch.Generator().manual_seed(1)
    lengths = (2, 30, 7, 60, 19, 3, 63, 41, 5, 12, 58)
    return [torch.randint(0, NUM_TOKENS, (length,), generator=draw).tolist() for length in lengths]


def answers(model, prompts, batch_size, temperature=0.0, seed=0, max_new_tokens=20):
    written = [None] * len(prompts)
    with answering(model, torch.float32) as bare:
        for places, room in batches_by_length(prompts, batch_size, max_new_tokens, limits_of(bare.config)):
            seeds = [seed + place for place in places]
            sampling = SeededSampling(temperature, seeds) if temperature else None
            asked = [prompts[place] for place in places]
            for place, one in zip(places, write_batch(bare, Tokens, asked, STOPS, room, sampling), strict=True):
                written[place] = one
    return written


def answer_alone(model, prompt, max_new_tokens=20):
    """Return the likeliest tokens one by one, without cache, batch, padding or `generate`."""
    ids, model = list(prompt), model.eval()
    while len(ids) < min(len(prompt) + max_new_tokens, POSITIONS):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in STOPS:
            return ids[len(prompt) : -1], True
    return ids[len(prompt) :], False


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_answer_to_a_prompt_does_not_depend_on_its_batch(kind):
    model, prompts = build(kind), ragged_prompts()
    expected = [answer_alone(model, prompt) for prompt in prompts]
    assert len({tuple(ids) for ids, _ in expected}) > 6
    assert {is_whole for _, is_whole in expected} == {True, False}
    # Prompts near the last position have less room: 64 - 60, 64 - 63, 64 - 58.
    assert {len(ids) for ids, is_whole in expected if not is_whole} >= {1, 4, 20}
    for batch_size in (1, 3, 11):
        assert answers(model, prompts, batch_size) == expected


def test_what_is_drawn_depends_on_seed_and_row_alone():
    model, prompts = build("qwen2"), ragged_prompts()
    drawn = answers(model, prompts, 1, temperature=1.0)
    assert drawn == answers(model, prompts, 4, temperature=1.0) == answers(model, prompts, 11, temperature=1.0)
    assert drawn != answers(model, prompts, 4, temperature=1.0, seed=100)
    assert drawn != answers(model, prompts, 4)
    assert answers(model, prompts, 4, temperature=1e-4) == answers(model, prompts, 4)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    num, temperature = 20_000, 1.5
    sampling = SeededSampling(temperature, range(num))
    drawn = sampling(None, scores.expand(num, 4)).argmax(dim=-1)
    shares = torch.bincount(drawn, minlength=4) / num
    expected = torch.softmax(scores / temperature, dim=0)
    assert torch.allclose(shares, expected, atol=4 * (0.25 / num) ** 0.5)


def test_rows_past_the_first_positions_of_long_rope_are_alone():
    prompts = [[1] * length for length in (5, 50, 6, 70, 30)]
    batches = list(batches_by_length(prompts, 8, 20, Limits(200, 64)))
    assert batches == [([0, 2, 4], 20), ([1], 20), ([3], 20)]


def test_the_stops_are_those_of_the_turn_and_of_the_tokenizer():
    assert stop_ids(Tokens, 7) == [7, 12]
    assert stop_ids(Tokens, 7, GenerationConfig(eos_token_id=[12, 20])) == [7, 12, 20]
    assert stop_ids(Tokens, 7, GenerationConfig(eos_token_id=5)) == [5, 7, 12]
    assert stop_ids(Tokens, 7, GenerationConfig()) == [7, 12]


class Bytes:
    """A tokenizer whose ids are bytes, as parts of characters are to byte-level ones."""

    def decode(self, ids, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["h\u00e9 \U0001f600 \u4f60\u597d!", "\U0001f469\u200d\U0001f467", "plain"])
def test_a_character_of_several_tokens_is_shown_whole(text):
    pieces = []
    shown = ShownAnswer(Bytes(), [300], pieces.append)
    shown.put(torch.tensor([[1, 2, 3]]))
    for byte in text.encode():
        shown.put(torch.tensor([byte]))
    shown.put(torch.tensor([300]))
    shown.end()
    assert pieces == list(text)
    assert shown.text == text


def test_what_never_becomes_a_character_is_shown_at_the_end():
    pieces = []
    shown = ShownAnswer(Bytes(), [300], pieces.append)
    shown.put(torch.tensor([[1]]))
    for byte in b"a\xe4b\xf0\x9f":
        shown.put(torch.tensor([byte]))
    assert pieces == ["a", "\ufffdb"]
    shown.end()
    assert "".join(pieces) == "a\ufffdb\ufffd"


def test_a_terminal_is_not_commanded():
    assert without_controls("a\x1b[31mb\x07\r\n\tc\u3000\u200d") == "a\ufffd[31mb\ufffd\ufffd\n\tc\u3000\u200d"
