"""Conversations as they are trained: every answer behind the very tokens that generation would see there."""

import json

import pytest

from tiny_data import CASES, build_recipe, shared, write_jsonl
from tiny_models import CHATML, build_tiny_tokenizer
from tunebook.data.prepare import prepare_data, write_quarantine
from tunebook.errors import Refused

pytestmark = pytest.mark.slow

# Leaves the thoughts out of every answer but the last, as the templates of reasoning models do.
FORGETFUL = CHATML.replace(
    "m['content'] +",
    "(m['content'].split('</think>')[-1] if m.role == 'assistant' and not loop.last else m['content']) +",
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache for each test."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def qwen():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(shared("assets", "qwen2.5-tokenizer")))


def talk(*contents, system=None):
    """Return messages of user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def prepare(tmp_path, rows, tokenizer, **data):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return prepare_data(build_recipe(path, **data), tokenizer)


def spans(labels):
    """Return the places of labels that count, as runs."""
    runs = []
    for place, label in enumerate(labels):
        if label != -100:
            if runs and runs[-1][1] == place:
                runs[-1][1] = place + 1
            else:
                runs.append([place, place + 1])
    return runs


def check_row(row, messages, tokenizer, stop, tools=None):
    """Check that each answer of the messages stands in the row behind what generation sees; return how many do."""
    runs = spans(row["labels"])
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for (start, end), place in zip(runs, places, strict=True):
        seen = tokenizer.apply_chat_template(
            messages[:place], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert row["input_ids"][:start] == seen
        assert row["labels"][start:end] == row["input_ids"][start:end]
        assert row["labels"][end - 1] == stop
        assert row["labels"][start:end].count(stop) == 1
    return len(runs)


@pytest.mark.parametrize("system", [None, "Be brief.", ""])
def test_every_answer_of_a_conversation_is_trained_on_qwen(tmp_path, qwen, system):
    messages = talk("Hi", "Hello!", "Count.", "1\n2", "日本?", "Ünï 😀", system=system)
    data = prepare(tmp_path, [{"messages": messages}], qwen)
    [row] = data.train
    assert check_row(row, messages, qwen, data.stop_token_id) == 3
    answers = [qwen.decode(row["labels"][start : end - 1]) for start, end in spans(row["labels"])]
    assert answers == ["Hello!", "1\n2", "Ünï 😀"]
    assert qwen.decode([data.stop_token_id]) == "<|im_end|>"
    assert (data.num_rows, data.num_train_rows, data.num_split_rows, data.forms) == (1, 1, 0, ("messages",))


def test_real_conversations_are_one_row_each_on_qwen(qwen):
    path = shared("data", "sharegpt_500.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    data = prepare_data(build_recipe(path), qwen)
    assert (data.num_train_rows, data.num_bad_rows, data.num_split_rows) == (500, 0, 0)
    for row, prepared in zip(rows, data.train, strict=True):
        messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        assert check_row(prepared, messages, qwen, data.stop_token_id) == len(messages) // 2


def test_calls_results_and_tools_are_shown_by_the_template(tmp_path, qwen):
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": 2}}}
    messages = talk("Look", system="Use tools.")
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    messages += [{"role": "tool", "content": "43"}, {"role": "assistant", "content": "It is 42."}]
    sent = json.loads(json.dumps(messages))
    sent[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(call["function"]["arguments"])  # as OpenAI sends it
    sent[2]["content"] = None
    data = prepare(tmp_path, [{"messages": sent, "tools": tools}], qwen)
    [row] = data.train
    assert check_row(row, messages, qwen, data.stop_token_id, tools) == 2
    called, answered = (qwen.decode(row["labels"][start:end]) for start, end in spans(row["labels"]))
    assert called == '<tool_call>\n{"name": "look", "arguments": {"at": "é", "n": 2}}\n</tool_call><|im_end|>'
    assert answered == "It is 42.<|im_end|>"
    assert "<tool_response>\n43\n</tool_response>" in qwen.decode(row["input_ids"])


@pytest.mark.parametrize("answer", ["\n\nred", "\nred", " red", "\n"])
def test_an_answer_that_merges_with_its_prompt_begins_no_later_row(tmp_path, qwen, answer):
    messages = talk("Hi", f"{answer}x", "And?", "blue")
    data = prepare(tmp_path, [{"messages": messages}], qwen)
    places = iter((1, 3))
    for row in data.train:
        for start, end in spans(row["labels"]):
            place = next(places)
            seen = qwen.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
            assert row["input_ids"][:start] == seen
            assert qwen.decode(row["labels"][start:end]) == f"{messages[place]['content']}<|im_end|>"
    assert next(places, None) is None
    assert data.num_train_rows == 1 + data.num_split_rows


def test_tokens_that_would_reach_over_a_border_make_rows_of_their_own(tmp_path, qwen):
    data = prepare(tmp_path, [{"messages": talk("Hi", "\n\nred", "And?", "blue")}], qwen)
    assert (data.num_rows, data.num_split_rows, data.num_train_rows) == (1, 1, 2)


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    messages = talk("Hi", "<think>a</think>Hello", "Count.", "<think>b</think>one", "More.", "two")
    data = prepare(tmp_path, [{"messages": messages}], tokenizer)
    assert (data.num_rows, data.num_split_rows, data.num_train_rows) == (1, 2, 3)
    for place, row in zip((1, 3, 5), data.train, strict=True):
        [(start, end)] = spans(row["labels"])
        seen = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][:start] == seen
        assert tokenizer.decode(row["labels"][start:end]) == f"{messages[place]['content']}<|im_end|>"
    assert "<think>" not in tokenizer.decode(data.train[2]["input_ids"])


def test_answers_without_thoughts_stay_one_row_under_such_a_template(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    data = prepare(tmp_path, [{"messages": talk("Hi", "Hello", "Count.", "one")}], tokenizer)
    assert (data.num_train_rows, data.num_split_rows) == (1, 0)


def test_parts_of_a_conversation_are_held_out_together(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    rows = [{"messages": talk(f"Hi {n}", "<think>a</think>Hello", "Count.", f"number {n}")} for n in range(20)]
    data = prepare(tmp_path, rows, tokenizer, validation=0.25, answer_rows=5)
    assert (data.num_train_rows, data.num_eval_rows, data.num_split_rows) == (30, 10, 20)
    held = {tokenizer.decode(row["input_ids"]).split("Hi ")[1].split("<")[0] for row in data.evaluation}
    trained = {tokenizer.decode(row["input_ids"]).split("Hi ")[1].split("<")[0] for row in data.train}
    assert len(held) == 5 and not held & trained
    for example in data.examples:
        assert example.prompt == "Count."
        assert example.answer.startswith("number ")
        asked = tokenizer.decode(list(example.prompt_ids))
        assert asked.endswith("user\nCount.<|im_end|>\n<|im_start|>assistant\n")
        assert f"Hi {example.answer.removeprefix('number ')}<" in asked


def test_train_on_says_which_tokens_count(tmp_path):
    tokenizer = build_tiny_tokenizer()
    rows = [{"messages": talk("Hi", "Hello", "Count.", "one", system="s")}]
    every = prepare(tmp_path, rows, tokenizer).train[0]
    last = prepare(tmp_path, rows, tokenizer, train_on="last_response").train[0]
    whole = prepare(tmp_path, rows, tokenizer, train_on="all").train[0]
    assert every["input_ids"] == last["input_ids"] == whole["input_ids"]
    assert len(spans(every["labels"])) == 2
    assert spans(last["labels"]) == spans(every["labels"])[1:]
    assert spans(whole["labels"]) == [[1, len(whole["labels"])]]


def test_training_everything_trains_each_token_of_a_conversation_once(tmp_path, qwen):
    messages = talk("Hi", "\n\nHello", "And?", "blue", "More?", "\nred")
    data = prepare(tmp_path, [{"messages": messages}] * 2, qwen, train_on="all", validation=0.5)
    assert (data.num_train_rows, data.num_eval_rows, data.num_split_rows) == (1, 1, 0)
    [row] = data.train
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    text = qwen.apply_chat_template(messages, tokenize=False)
    assert qwen.decode(row["input_ids"]) == text.removesuffix("\n")
    assert list(data.examples[0].prompt_ids) == qwen.apply_chat_template(
        messages[:5], add_generation_prompt=True, return_dict=False
    )


def test_training_everything_refuses_histories_that_the_template_rewrites(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    plain = {"messages": talk("Hi", "Hello", "Count.", "one")}
    thoughts = {"messages": talk("Hi", "<think>a</think>Hello", "Count.", "one")}
    data = prepare(tmp_path, [plain, thoughts], tokenizer, train_on="all", max_bad_fraction=0.5)
    assert (data.num_train_rows, data.num_bad_rows, data.num_split_rows) == (1, 1, 0)
    assert "rewrites its earlier turns, which data.train_on: all would train several" in data.quarantined[0].reason
    assert prepare(tmp_path, [plain, thoughts], tokenizer).num_train_rows == 3
    blank = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    tokenizer.chat_template = blank + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    assert prepare(tmp_path, [plain], tokenizer, train_on="all").num_bad_rows == 0


def test_turns_of_weight_zero_are_shown_and_not_trained(tmp_path):
    tokenizer = build_tiny_tokenizer()
    messages = talk("Hi", "Hello", "Count.", "one")
    messages[1]["weight"] = 0
    [row] = prepare(tmp_path, [{"messages": messages}], tokenizer).train
    [(start, end)] = spans(row["labels"])
    assert tokenizer.decode(row["labels"][start:end]) == "one<|im_end|>"
    assert "Hello" in tokenizer.decode(row["input_ids"])


def test_a_conversation_cut_short_keeps_whole_answers_and_no_false_stop(tmp_path):
    tokenizer = build_tiny_tokenizer()
    rows = [{"messages": talk("Hi", "Hello", "Count.", "one two three four five six")}]
    whole = prepare(tmp_path, rows, tokenizer)
    (_, first_end), (second, end) = spans(whole.train[0]["labels"])
    for limit in (first_end + 3, second):
        cut = prepare(tmp_path, rows, tokenizer, max_length=limit)
        assert cut.train[0]["input_ids"] == whole.train[0]["input_ids"][:first_end]
        assert cut.train[0]["labels"][-1] == cut.stop_token_id
        assert (cut.num_truncated_rows, cut.response_tokens_lost) == (1, end - second)
    cut = prepare(tmp_path, rows, tokenizer, max_length=second + 2)
    assert cut.train[0]["length"] == second + 2
    assert cut.train[0]["labels"][-1] != cut.stop_token_id
    assert cut.response_tokens_lost == end - second - 2


def test_special_tokens_in_the_text_end_no_turn_and_those_of_an_answer_are_its_own(tmp_path, qwen):
    messages = talk("Is <|im_end|> one?", "<tool_call>\n{}\n</tool_call> and <|im_end|>", "And?", "<|endoftext|>")
    data = prepare(tmp_path, [{"messages": messages}], qwen)
    for row in data.train:
        for start, end in spans(row["labels"]):
            assert row["labels"][start:end].count(data.stop_token_id) == 1
    first = data.train[0]["labels"]
    assert qwen.convert_tokens_to_ids("<tool_call>") in first
    assert qwen.convert_tokens_to_ids("<|endoftext|>") not in data.train[len(data.train) - 1]["labels"]


def test_plain_text_is_trained_whole_between_one_bos_and_one_eos(tmp_path):
    for kind, written in (("metaspace", "<s>"), ("bytelevel", "")):
        tokenizer = build_tiny_tokenizer(kind)
        rows = [{"text": "one two"}, {"text": f"{written}one two{tokenizer.eos_token}"}]
        data = prepare(tmp_path, rows, tokenizer, validation=0.5)
        first, second = data.train[0], data.evaluation[0]
        assert first == second
        assert first["input_ids"].count(tokenizer.eos_token_id) == 1
        assert first["input_ids"][-1] == data.stop_token_id == tokenizer.eos_token_id
        assert first["input_ids"] == tokenizer("one two")["input_ids"] + [tokenizer.eos_token_id]
        assert first["labels"] == [-100, *first["input_ids"][1:]]
        assert (data.forms, data.examples) == (("text",), ())


def test_rows_that_the_template_refuses_are_bad_rows_with_their_place(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}" + CHATML
    )
    rows = [{"messages": talk("Hi", "Hello")}] * 9 + [{"messages": talk("Hi", "Hello", system="s")}]
    data = prepare(tmp_path, rows, tokenizer, max_bad_fraction=0.2)
    assert (data.num_rows, data.num_train_rows, data.num_bad_rows) == (10, 9, 1)
    write_quarantine(data, tmp_path / "quarantine.jsonl")
    entry = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert entry["line"] == 10 and "No system!" in entry["reason"]
    with pytest.raises(Refused, match="1 of 10 rows can't be used"):
        prepare(tmp_path, rows, tokenizer)


def test_a_template_that_would_leave_something_out_is_noticed(tmp_path):
    tokenizer = build_tiny_tokenizer()
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    call = [{"name": "look", "arguments": {}}]
    for template, messages, reason in (
        (silent, talk("Hi", "Hello", system="Be brief."), "does not show the system turn"),
        (
            CHATML,
            [*talk("Hi"), {"role": "assistant", "content": "", "tool_calls": call}],
            "not show the call of 'look'",
        ),
    ):
        tokenizer.chat_template = template
        with pytest.raises(Refused, match=reason):
            prepare(tmp_path, [{"messages": messages}], tokenizer)


# Writes thoughts as Qwen3's template does: those of answers before the last question are left out.
THOUGHTFUL = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def thinking(key="reasoning_content"):
    messages = talk("Hi", "Hello", "Count.", "one")
    messages[1][key], messages[3][key] = "first\nthought", "\nsecond\n"
    return messages


def test_thoughts_of_each_trained_answer_are_trained_and_those_before_it_are_not(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = THOUGHTFUL
    written = talk("Hi", "<think>first\nthought</think>Hello", "Count.", "<think>\nsecond\n</think>\none")
    for messages in (thinking(), thinking("thinking"), written):
        rows = [
            tokenizer.decode(row["input_ids"]) for row in prepare(tmp_path, [{"messages": messages}], tokenizer).train
        ]
        assert [row.split("assistant\n")[-1] for row in rows] == [
            "<think>\nfirst\nthought\n</think>\n\nHello<|im_end|>",
            "<think>\nsecond\n</think>\n\none<|im_end|>",
        ]
        assert "first" not in rows[1]


ANSWER = "m['content'] +"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, thinking(), "does not show the answer's reasoning_content"),
        (CHATML, thinking("thinking"), "does not show the answer's thinking"),
        (
            CHATML.replace(ANSWER, "m['content'][:30] +"),
            talk("Hi", "long " * 10),
            "changes or cuts the answer 'long long",
        ),
        (CHATML.replace(ANSWER, "m['content'] | replace('red', 'blue') +"), talk("Hi", "red"), "changes or cuts"),
        (CHATML.replace(ANSWER, "m['content'].split('</think>')[-1] +"), talk("Hi", "<think>a</think>b"), "cuts the"),
        (CHATML.replace(ANSWER, "m['content'] + ('!' if 'red' in m['content'] else '') +"), talk("Hi", "red"), "cuts"),
        (CHATML.replace(ANSWER, "m['content'].split('.')[0] +"), talk("Hi", "a. b", "Go", "c"), "the answer 'a. b'"),
        (
            CHATML.replace("in messages %}", "in messages if 'secret' not in m.content %}"),
            talk("A secret", "a", "Go", "c"),
            "does not show what the user says: 'A secret'",
        ),
    ],
)
def test_a_template_that_would_hide_or_change_an_answer_is_noticed(tmp_path, template, messages, reason):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(Refused, match=reason):
        prepare(tmp_path, [{"messages": messages}], tokenizer)


def test_a_call_that_is_not_in_its_answer_is_noticed_where_the_tools_name_it(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}" + CHATML
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = [{"name": "look", "arguments": {"at": 1}}]
    rows = [{"messages": [*talk("Hi"), {"role": "assistant", "content": "So", "tool_calls": call}], "tools": tools}]
    with pytest.raises(Refused, match="does not show the call of 'look'"):
        prepare(tmp_path, rows, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        ANSWER, "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '') +"
    )
    with pytest.raises(Refused, match="does not show 'at' of the call of 'look'"):
        prepare(tmp_path, rows, tokenizer)


def test_turns_after_the_last_trained_answer_are_counted(tmp_path):
    tokenizer = build_tiny_tokenizer()
    rows = [{"messages": talk("Hi", "Hello", *rest)} for rest in ((), ("Count.",), ("Count.", "one"), ("More",))]
    data = prepare(tmp_path, rows, tokenizer)
    assert data.notes == (
        "2 conversations go on after the last answer that is trained; the turns after it are left out",
    )
    assert "Count" not in tokenizer.decode(data.train[1]["input_ids"])
    assert prepare(tmp_path, rows[1:3], tokenizer).notes[0].startswith("1 conversation goes on")
    assert prepare(tmp_path, rows[:1], tokenizer).notes == ()


def test_a_base_model_without_a_template_needs_one_for_conversations(tmp_path):  # case H01
    tokenizer = build_tiny_tokenizer(chat_template=False)
    path = CASES / "H01" / "data.jsonl"
    with pytest.raises(Refused) as refused:
        prepare_data(build_recipe(path), tokenizer)
    assert "data.template: the tokenizer has no chat_template, and rows of the form messages need one" in str(
        refused.value
    )
    data = prepare_data(build_recipe(path, template="chatml"), tokenizer)
    assert data.num_train_rows == 2
    assert tokenizer.decode([data.stop_token_id]) == "<|im_end|>"
    assert data.template == "ChatML"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert "<|im_start|>" in (tmp_path / "saved" / "chat_template.jinja").read_text()
    alpaca = prepare_data(build_recipe(path, template="alpaca"), build_tiny_tokenizer(chat_template=False))
    assert alpaca.num_train_rows == 2


def test_the_alpaca_text_takes_one_question_and_one_answer(tmp_path):
    tokenizer = build_tiny_tokenizer()
    for messages, what in (
        (talk("a", "b", "c", "d"), "this row has 4 turns"),
        (talk("a", "b", system="s"), "this row has a system turn"),
    ):
        with pytest.raises(Refused, match=what):
            prepare(tmp_path, [{"messages": messages}], tokenizer, template="alpaca")


def test_chatml_needs_its_tokens():
    with pytest.raises(Refused, match=r"the tokenizer has no token <\|im_start\|>"):
        prepare_data(build_recipe(CASES / "H01" / "data.jsonl", template="chatml"), build_tiny_tokenizer("metaspace"))


def test_a_template_file_is_used_saved_and_part_of_the_cache_key(tmp_path):
    file = tmp_path / "mine.jinja"
    folders = set()
    for word in ("A", "B"):
        file.write_text(CHATML.replace("m['content']", f"'{word} ' + m['content']"))
        tokenizer = build_tiny_tokenizer(chat_template=False)
        data = prepare_data(build_recipe(CASES / "H01" / "data.jsonl", template=str(file)), tokenizer)
        assert f"user\n{word} Name a color." in tokenizer.decode(data.train[0]["input_ids"])
        assert tokenizer.chat_template == file.read_text()
        folders.add(data.folder)
    assert len(folders) == 2
    file.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(Refused, match=r"mine\.jinja:2: data\.template: is no chat template"):
        prepare_data(build_recipe(CASES / "H01" / "data.jsonl", template=str(file)), build_tiny_tokenizer())


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_one_bos_and_one_stop_token_in_each_form(tmp_path, pad):  # cases E01, H03
    tokenizer = build_tiny_tokenizer("metaspace", pad=pad)
    rows = [{"instruction": "Name a color.", "output": "red"}]
    for name, given in (
        ("alpaca", rows),
        ("messages", [{"messages": talk("Name a color.", "red")}]),
        ("prompt_completion", [{"prompt": "Name a color.", "completion": "red"}]),
        ("text", [{"text": "red"}]),
    ):
        data = prepare(tmp_path, given, tokenizer, format=name)
        [row] = data.train
        assert row["input_ids"][0] == tokenizer.bos_token_id != row["input_ids"][1]
        assert row["labels"][-1] == data.stop_token_id
        assert row["labels"].count(data.stop_token_id) == 1
