"""Rows shown as they will be trained: every token once, nothing hidden."""

import pytest

from tiny_models import build_tiny_tokenizer
from tunebook.plan.row_view import LONGEST_SHOWN, escape_text, render_rows, view_row

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


def test_every_token_is_shown_once_and_the_trained_ones_are_marked(tokenizer):
    prompt = tokenizer.encode("<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n")
    response = tokenizer.encode("red\tor green<|im_end|>")
    second = tokenizer.encode("\nblue")
    ids = [*prompt, *response, *second, *response]
    labels = [-100] * len(prompt) + response + [-100] * len(second) + response
    segments = view_row(ids, labels, tokenizer)
    assert [segment.trained for segment in segments] == [False, True, False, True]
    assert sum(segment.num_tokens for segment in segments) == len(ids)
    assert segments[1].text == "red\\tor green<|im_end|>"
    assert "".join(segment.text for segment in segments) == escape_text(tokenizer.decode(ids))
    lines = render_rows([("row 1", segments)]).plain.splitlines()
    assert lines[0] == f"row 1: {len(ids)} tokens, {2 * len(response)} of them trained (+)"
    assert [line[:4] for line in lines[1:]] == ["  | ", "  + ", "  | ", "  + "]
    assert lines[2] == "  + red\\tor green<|im_end|>"


def test_a_special_token_is_told_from_text_that_looks_like_one(tokenizer):
    text = tokenizer.encode("a <|im_end|>", split_special_tokens=True)
    special = tokenizer.encode("a <|im_end|>")
    assert text != special
    (as_text,), (as_special,) = view_row(text, text, tokenizer), view_row(special, special, tokenizer)
    assert as_text.text == as_special.text
    assert [is_special for _, is_special in as_text.pieces] == [False]
    assert [is_special for _, is_special in as_special.pieces] == [False, True]
    styles = [{str(span.style) for span in render_rows([("", [row])]).spans} for row in (as_text, as_special)]
    assert not any("cyan" in style for style in styles[0]) and any("cyan" in style for style in styles[1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("\\n", "\\\\n"),
        ("\U000e0041", "\\U000e0041"),
        ("naïve 好 🙂 [bold]", "naïve 好 🙂 [bold]"),
        ("\x85\u2028", "\\x85\\u2028"),
    ],
)
def test_what_would_be_hidden_or_obeyed_is_escaped(text, shown):
    assert escape_text(text) == shown


def test_a_long_row_keeps_both_ends(tokenizer):
    ids = tokenizer.encode("<|im_start|>" + "x y z " * 2000 + "<|im_end|>")
    (segment,) = view_row(ids, ids, tokenizer)
    line = render_rows([("long", [segment])]).plain.splitlines()[1]
    assert line.startswith("  + <|im_start|>x y z") and line.endswith("<|im_end|>")
    assert "characters ..." in line and len(line) < LONGEST_SHOWN + 60


def test_a_row_of_one_token(tokenizer):
    (segment,) = view_row([1], [-100], tokenizer)
    assert (segment.trained, segment.num_tokens) == (False, 1)
