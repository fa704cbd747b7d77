"""The border between prompt and response, and the token that ends a turn, for templates of many kinds."""

import pytest

from tiny_data import shared
from tiny_models import CHATML, build_tiny_tokenizer
from tunebook.data.chat_prompts import build_prompts, find_stop_token
from tunebook.data.conversation import Fault, pair
from tunebook.errors import Refused

pytestmark = pytest.mark.slow

RED = pair("Name a color.", "red")
CAT = pair("Translate to French.", "chat", "cat")


def with_template(template, tokenizer="bytelevel", **options):
    made = build_tiny_tokenizer(tokenizer, **options)
    made.chat_template = template
    return made


def turn(tokenizer, row=RED, template="auto"):
    [rendered] = build_prompts(tokenizer, template).render([row])
    return rendered if isinstance(rendered, Fault) else rendered[0]


def refusal(tokenizer, row=RED):
    with pytest.raises(Refused) as refused:
        turn(tokenizer, row)
    return str(refused.value)


def test_chatml_prompts_as_generation_does_and_stops_at_the_turn_end():
    tokenizer = build_tiny_tokenizer()
    prompts = build_prompts(tokenizer, "auto")
    [[red], [cat]] = prompts.render([RED, CAT])
    assert red.prompt == "<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n"
    assert (red.response, red.marked) == ("red", False)
    assert "user\nTranslate to French.\n\ncat<|im_end|>" in cat.prompt
    assert prompts.stop_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.eos_token_id
    assert prompts.leading_ids == []
    assert find_stop_token(tokenizer, "auto") == prompts.stop_token_id


def test_a_base_model_without_a_template_gets_the_alpaca_text():
    tokenizer = build_tiny_tokenizer("metaspace", chat_template=False)
    prompts = build_prompts(tokenizer, "auto")
    [[red], [cat]] = prompts.render([RED, CAT])
    assert prompts.name == "alpaca text"
    assert red.prompt.startswith("Below is an instruction that describes a task. Write a response")
    assert red.prompt.endswith("### Instruction:\nName a color.\n\n### Response:\n")
    assert "Input" not in red.prompt
    assert cat.prompt.endswith("### Instruction:\nTranslate to French.\n\n### Input:\ncat\n\n### Response:\n")
    assert cat.response == "chat"
    assert prompts.stop_token_id == tokenizer.eos_token_id
    assert prompts.leading_ids == [tokenizer.bos_token_id]


def test_the_recipe_may_ask_for_the_alpaca_text():
    assert build_prompts(build_tiny_tokenizer(), "alpaca").name == "alpaca text"


def test_a_row_cannot_change_the_text_around_it():
    row = pair("{input} {0} %s", "{output}", "{instruction}")
    rendered = turn(build_tiny_tokenizer(chat_template=False), row)
    assert "### Instruction:\n{input} {0} %s\n\n### Input:\n{instruction}\n" in rendered.prompt


def test_without_any_end_token_a_recipe_is_refused():
    tokenizer = build_tiny_tokenizer("metaspace", chat_template=False)
    tokenizer.eos_token = None
    with pytest.raises(Refused, match="no token ends a turn"):
        build_prompts(tokenizer, "auto")


def test_a_template_without_an_end_gets_the_eos_token():
    tokenizer = with_template("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    prompts = build_prompts(tokenizer, "auto")
    assert prompts.stop_token_id == tokenizer.eos_token_id
    assert turn(tokenizer).response == "assistant: red"


def test_what_follows_the_end_of_the_turn_is_cut():
    template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer = with_template(template)
    prompts = build_prompts(tokenizer, "auto")
    assert prompts.stop_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn(tokenizer).response == "red"


def test_what_the_template_writes_before_the_answer_is_trained():
    template = CHATML.replace("m['content'] +", "('<think></think>' if m.role == 'assistant' else '') + m['content'] +")
    assert turn(with_template(template)).response == "<think></think>red"


@pytest.mark.parametrize("expression", ["m['content'] | trim", "m['content'].strip()"])
def test_a_template_that_trims_is_followed(expression):
    tokenizer = with_template(CHATML.replace("m['content']", expression))
    rendered = turn(tokenizer, pair("  Name a color. ", " red\n"))
    assert "user\nName a color.<|im_end|>" in rendered.prompt
    assert rendered.response == "red"


def test_a_blank_that_only_the_generation_prompt_ends_with_stays_in_the_prompt():
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    rendered = turn(with_template(template))
    assert rendered.prompt.endswith("<|endoftext|>assistant: ")
    assert rendered.response == "red"


def test_a_generation_prompt_that_no_answer_follows_is_refused():
    template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    text = refusal(with_template(template))
    assert "its generation prompt goes on with '<think>" in text
    assert "data.template: alpaca" in text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must be odd') }}", "roles must be odd"),
        ("{% for m in messages %}{{ m.content.nothing.at_all }}{% endfor %}", "the chat template fails on it"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "it does not show the user's message"),
        ("{{ messages[0].content }}", "it does not show the assistant's answer"),
        ("{{ broken", "the chat template fails on it"),
    ],
)
def test_a_template_that_cannot_be_trained_with_says_why(template, reason):
    text = refusal(with_template(template))
    assert "chat template can't be trained with" in text
    assert reason in text


def test_a_row_whose_turn_ends_in_another_way_is_bad():
    template = CHATML.replace("m['content'] +", "m['content'] + ('!' if 'green' in m['content'] else '') +")
    tokenizer = with_template(template.replace("'!' if", "eos_token if"))
    assert turn(tokenizer).response == "red"
    odd = with_template(CHATML.replace("'<|im_end|>'", "('' if 'green' in m['content'] else '<|im_end|>')"))
    assert turn(odd).response == "red"
    assert turn(odd, pair("Name a color.", "green")) == Fault(
        "", "the chat template ends the turn in another way for the answer to 'Name a color.'"
    )


def test_rows_that_hold_control_tokens_are_marked():
    tokenizer = build_tiny_tokenizer()
    prompts = build_prompts(tokenizer, "auto")
    rows = [RED, pair("What does <|im_end|> do?", "red"), pair("Name a color.", "It is <|endoftext|>.")]
    assert [rendered.marked for [rendered] in prompts.render(rows)] == [False, True, True]
    alpaca = build_prompts(tokenizer, "alpaca")
    assert [rendered.marked for [rendered] in alpaca.render(rows)] == [False, True, True]


def test_rendering_once_and_rendering_each_row_agree_on_real_rows(monkeypatch):
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared("assets", "qwen2.5-tokenizer-mini")))
    raw = json.loads(shared("data", "alpaca_2000.json").read_text(encoding="utf-8"))
    rows = [pair(row["instruction"], row["output"], row["input"]) for row in raw if row["output"].strip()]
    prompts = build_prompts(tokenizer, "auto")
    assert prompts._shape is not None
    by_shape = prompts.render(rows)
    monkeypatch.setattr(prompts, "_shape", None)
    assert prompts.render(rows) == by_shape
    assert len(by_shape) > 1900
