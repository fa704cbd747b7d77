"""Only a template that provably treats every message alike is rendered once for all rows."""

import json
from types import SimpleNamespace

import pytest

from tiny_data import shared
from tiny_models import CHATML, LLAMA2

pytestmark = pytest.mark.slow  # transformers compiles the templates

TOKENIZER = SimpleNamespace(special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})


def shape_of(template):
    from tunebook.data.turn_shape import find_turn_shape

    return find_turn_shape(TOKENIZER, template)


def test_what_chatml_puts_around_a_turn():
    assert shape_of(CHATML) == ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "", "<|im_end|>\n")


def test_what_llama_puts_around_a_turn():
    assert shape_of(LLAMA2) == ("<s>[INST] ", " [/INST]", " ", "</s>")


def test_the_template_of_qwen_has_a_shape():
    path = shared("assets", "qwen2.5-tokenizer", "tokenizer_config.json")
    shape = shape_of(json.loads(path.read_text(encoding="utf-8"))["chat_template"])
    assert shape.before.startswith("<|im_start|>system\nYou are Qwen")
    assert shape.tail == "<|im_end|>\n"


def with_content(expression):
    return CHATML.replace("m['content']", expression)


def with_statement(statement):
    return CHATML.replace("{{'<|im_start|>'", statement + "{{'<|im_start|>'", 1)


@pytest.mark.parametrize(
    "template",
    [
        with_content("m['content'] | trim"),
        with_content("m['content'].strip()"),
        with_content("m['content'].split('</think>')[-1]"),
        with_content("m['content'] | tojson"),
        with_content("m['content'] | upper"),
        with_content("m['content'] | replace('a', 'b')"),
        with_content("m['content'][:100]"),
        with_content("'%s' % m['content']"),
        with_content("'{}'.format(m['content'])"),
        with_content("'x'.join([m['content']])"),
        with_content("([m['content']] | join)"),
        with_content("(('' ~ m['content']) | replace('a', 'b'))"),
        with_content("(('\n' + m['content']) | trim)"),
        with_statement("{% if 'x' in m['content'] %}y{% endif %}"),
        with_statement("{% if m['content'] in 'x y z' %}y{% endif %}"),
        with_statement("{% if m['content'] == 'x' %}y{% endif %}"),
        with_statement("{% if m['content'] | length > 1000 %}y{% endif %}"),
        with_statement("{% if 'abc'.startswith(m['content']) %}y{% endif %}"),
        with_statement("{% if {'x': 1}[m['content']] is defined %}y{% endif %}"),
        with_statement("{% if m['content'] is in ['x'] %}y{% endif %}"),
        with_statement("{% set x %}{{ m['content'] }}{% endset %}{% if '</think>' in x %}y{% endif %}"),
        "{% macro show(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ show(m.content) | replace('a', '') }};"
        "{% endfor %}",
        "{% filter trim %}" + CHATML + "{% endfilter %}",
        "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %};{% endfor %}",
        "{% for m in messages | sort(attribute='content') %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ broken",
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_that_does_more_than_write_contents_has_none(template):
    assert shape_of(template) is None


def test_conditions_that_hold_for_every_text_are_no_obstacle():
    template = with_statement("{% if m['content'] is string and m['content'] %}{% endif %}")
    assert shape_of(template) == shape_of(CHATML)
