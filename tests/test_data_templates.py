"""Conversations under chat templates of other families: what is trained is what each of them shows at generation."""

import pytest

from tiny_data import build_recipe, write_jsonl
from tiny_models import CHATML, build_tiny_tokenizer
from tunebook.data.prepare import prepare_data
from tunebook.errors import Refused

pytestmark = pytest.mark.slow

# Written after the ways of published templates, with the tokens of the tiny tokenizers.
TEMPLATES = {
    # A BOS of its own, contents trimmed, no line end after a turn (Llama 3).
    "trimming": (
        "metaspace",
        "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']\n\n' + m.content | trim + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}",
    ),
    # The system turn goes into the first question, roles have other names (Gemma).
    "folding": (
        "bytelevel",
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
        "{% else %}{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.system"
        " + (m.content | trim) + '<|im_end|>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
    ),
    # Each question in brackets, answers between spaces, roles must take turns (Mistral).
    "bracketing": (
        "metaspace",
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    ),
    # Thoughts are shown after the last question alone, and an empty pair of tags stands for none (Qwen3).
    "thinking": (
        "bytelevel",
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% if loop.index0 > ns.last %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + said }}{% else %}{{ said }}{% endif %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    # Something after the last turn, which a conversation that goes on has not.
    "closing": ("bytelevel", CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"),
}
TALKS = {
    "two answers": ["Hi", "Hello", "Count.", "one two"],
    "three answers": ["Hi", "Hello", "Count.", "one\ntwo", "More.", "three"],
    "blanks around": ["  Hi ", "Hello", "Count. ", " one two\n"],
    "many languages": ["日本?", "Ünï 😀", "e\u0301", "مرحبا"],
}


def messages_of(contents, system=None):
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_answer_stands_behind_what_generation_sees(tmp_path, monkeypatch, family, name, system):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    kind, template = TEMPLATES[family]
    tokenizer = build_tiny_tokenizer(kind)
    tokenizer.chat_template = template
    messages = messages_of(TALKS[name], system)
    recipe = build_recipe(write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}]))
    if family == "bracketing" and system:
        with pytest.raises(Refused, match="fails on it: Roles must alternate"):
            prepare_data(recipe, tokenizer)
        return
    data = prepare_data(recipe, tokenizer)
    places = iter(n for n, message in enumerate(messages) if message["role"] == "assistant")
    for row in data.train:
        ends = [n for n, label in enumerate(row["labels"]) if label == data.stop_token_id]
        for end in ends:
            start = end
            while row["labels"][start - 1] != -100:
                start -= 1
            place = next(places)
            seen = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
            assert row["input_ids"][:start] == seen
            said = tokenizer.decode(row["labels"][start:end])
            assert said.strip().endswith(messages[place]["content"].strip())
        assert ends and ends[-1] == len(row["labels"]) - 1
    assert next(places, None) is None
    assert data.num_bad_rows == 0
