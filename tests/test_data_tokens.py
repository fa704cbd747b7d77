"""Ids at the border: prompts as generation sees them, responses that decode to the answer, control tokens as text."""

import json

import pytest

from tiny_data import shared
from tiny_models import build_tiny_tokenizer
from tunebook.data.chat_prompts import build_prompts
from tunebook.data.conversation import pair
from tunebook.data.tokens import TurnEncoder

pytestmark = pytest.mark.slow

RED = pair("Name a color.", "red")
# How M03's template reads as a chat template: the marker of the reply holds the eos token, and ends with a space.
M03_TEMPLATE = (
    "{{ messages[0].content + '<|endoftext|>Assistant: ' }}"
    "{% if messages | length > 1 %}{{ messages[1].content + eos_token }}{% endif %}"
)


def encode(tokenizer, rows, template="auto"):
    """Return the prompts and the encoded turns of the rows."""
    prompts = build_prompts(tokenizer, template)
    turns = [turn for rendered in prompts.render(rows) for turn in rendered]
    return prompts, turns, TurnEncoder(tokenizer, prompts).encode(turns)


def generation_ids(tokenizer, row, sanitize=False):
    message = [{"role": "user", "content": row.messages[0].text}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=sanitize
    )


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
@pytest.mark.parametrize("template", ["auto", "alpaca"])
@pytest.mark.parametrize(
    "output", ["red", "one two three", "Ünïcödé 日本 😀", "a\n\nb\n", "1. x\n2. y", "<b>&amp;</b>"]
)
def test_labels_decode_to_the_answer_and_one_stop_token(kind, template, output):  # case M01
    tokenizer = build_tiny_tokenizer(kind)
    prompts, _, [turn] = encode(tokenizer, [pair("Name a color.", output)], template)
    assert turn.response_ids.count(prompts.stop_token_id) == 1
    assert turn.response_ids[-1] == prompts.stop_token_id
    assert tokenizer.decode(turn.response_ids[:-1]) == output


@pytest.mark.parametrize("output", ["\nred", " red", "\n\n", "  \n- red", "\tred", ": red"])
@pytest.mark.parametrize("template", ["auto", "alpaca"])
def test_an_answer_that_would_merge_with_the_prompt_is_kept_apart(output, template):
    tokenizer = build_tiny_tokenizer()
    row = pair("Name a color.", output)
    _, turns, [turn] = encode(tokenizer, [row], template)
    assert turn.prompt_ids == tokenizer.encode(turns[0].prompt, add_special_tokens=False)
    assert tokenizer.decode(turn.response_ids[:-1]) == output
    assert tokenizer.decode(turn.prompt_ids + turn.response_ids[:-1]) == turns[0].prompt + output


def test_the_qwen_tokenizer_does_merge_there_and_the_prompt_still_stands():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared("assets", "qwen2.5-tokenizer")))
    row = pair("Name a color.", "\n\nred")
    _, turns, [turn] = encode(tokenizer, [row])
    joined = tokenizer.encode(turns[0].prompt + row.messages[-1].content, add_special_tokens=False)
    assert joined[: len(turn.prompt_ids)] != turn.prompt_ids
    assert turn.prompt_ids == generation_ids(tokenizer, row)
    assert tokenizer.decode(turn.response_ids) == "\n\nred<|im_end|>"


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_a_marker_that_holds_the_pad_token_hides_nothing(pad):  # case M03
    tokenizer = build_tiny_tokenizer(pad=pad)
    tokenizer.chat_template = M03_TEMPLATE
    rows = [RED, pair("Count.", "one two three")]
    _, turns, encoded = encode(tokenizer, rows)
    for row, turn, text in zip(rows, encoded, turns, strict=True):
        assert text.prompt.endswith("Assistant: ")
        assert turn.prompt_ids == generation_ids(tokenizer, row)
        assert tokenizer.decode(turn.response_ids) == row.messages[-1].content + "<|endoftext|>"


@pytest.mark.parametrize("template", ["auto", "alpaca"])
def test_a_row_begins_with_exactly_one_bos(template):  # case H03
    tokenizer = build_tiny_tokenizer("metaspace")
    _, _, [turn] = encode(tokenizer, [RED], template)
    assert turn.prompt_ids[0] == tokenizer.bos_token_id
    assert (turn.prompt_ids + turn.response_ids).count(tokenizer.bos_token_id) == 1


def test_the_prompt_is_what_generation_sees():
    for kind in ("bytelevel", "metaspace"):
        tokenizer = build_tiny_tokenizer(kind)
        _, _, [turn] = encode(tokenizer, [RED])
        assert turn.prompt_ids == generation_ids(tokenizer, RED)
        _, turns, [turn] = encode(tokenizer, [RED], "alpaca")
        assert turn.prompt_ids == tokenizer(turns[0].prompt)["input_ids"]


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
@pytest.mark.parametrize("template", ["auto", "alpaca"])
def test_control_tokens_in_a_rows_text_are_trained_as_text(kind, template):
    tokenizer = build_tiny_tokenizer(kind)
    token = "<|im_end|>" if kind == "bytelevel" else "</s>"
    row = pair(f"What is {token}?", f"{token} ends a turn, so I stop at {token} now.")
    prompts, _, [turn, plain] = encode(tokenizer, [row, RED], template)
    stop = prompts.stop_token_id
    assert turn.response_ids.count(stop) == 1
    assert tokenizer.decode(turn.response_ids[:-1]) == row.messages[-1].content
    assert turn.prompt_ids.count(tokenizer.convert_tokens_to_ids(token)) == plain.prompt_ids.count(
        tokenizer.convert_tokens_to_ids(token)
    )
    if template == "auto":
        assert turn.prompt_ids == generation_ids(tokenizer, row, sanitize=True)
    # The backend is left as it was found: control tokens in other texts are tokens again.
    assert plain == encode(tokenizer, [RED], template)[2][0]


def test_settings_that_a_tokenizer_brings_along_do_not_cut_or_pad():
    tokenizer = build_tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert encode(tokenizer, [RED])[2] == encode(build_tiny_tokenizer(), [RED])[2]


def test_a_tokenizer_that_strips_around_its_tokens_is_left_to_do_so():
    from transformers import AddedToken

    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|note|>", lstrip=True, rstrip=True, special=True)])
    tokenizer.chat_template = tokenizer.chat_template.replace("+ '<|im_end|>'", "+ '. <|note|> <|im_end|>'")
    _, _, [turn] = encode(tokenizer, [RED])
    assert turn.prompt_ids == generation_ids(tokenizer, RED)


@pytest.mark.parametrize("name", ["qwen2.5-tokenizer", "qwen2.5-tokenizer-mini", "stories260K"])
@pytest.mark.parametrize("template", ["auto", "alpaca"])
def test_real_rows_give_the_ids_of_the_joined_text(name, template):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared("assets", name)))
    raw = json.loads(shared("data", "alpaca_2000.json").read_text(encoding="utf-8"))
    rows = [pair(row["instruction"], row["output"], row["input"]) for row in raw if row["output"].strip()]
    prompts, turns, encoded = encode(tokenizer, rows, template)
    stop = tokenizer.convert_ids_to_tokens(prompts.stop_token_id)
    backend = tokenizer.backend_tokenizer
    joined = backend.encode_batch([text.prompt + text.response + stop for text in turns], add_special_tokens=False)
    assert len(encoded) > 1900
    for row, text, turn, whole in zip(rows, turns, encoded, joined, strict=True):
        assert turn.prompt_ids + turn.response_ids == prompts.leading_ids + whole.ids
        assert tokenizer.decode(turn.response_ids[:-1]) == text.response == row.messages[-1].content
