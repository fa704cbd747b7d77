"""From a recipe to labelled tokens: what is trained, what is counted, what is cached, and what is refused."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from datetime import date
from pathlib import Path

import pytest

from tiny_data import CASES, build_recipe, write_jsonl
from tiny_models import CHATML, build_tiny_tokenizer
from tunebook.data.prepare import prepare_data, write_quarantine
from tunebook.errors import Refused

pytestmark = pytest.mark.slow

ROWS = [{"instruction": f"Say {number}", "input": "", "output": "one " * (1 + number % 7)} for number in range(2000)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache for each test."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepare(path, tokenizer=None, seed=0, **data):
    return prepare_data(build_recipe(path, seed=seed, **data), tokenizer or build_tiny_tokenizer())


def refusal(path, **options):
    with pytest.raises(Refused) as refused:
        prepare(path, **options)
    return str(refused.value)


def trained(row):
    return [label for label in row["labels"] if label != -100]


def made_folders(cache):
    return sorted(path.name for path in (cache / "tokens").iterdir() if path.is_dir())


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize("template", ["auto", "alpaca"])
def test_pad_never_hides_the_stop_token(pad, template):  # case E01
    tokenizer = build_tiny_tokenizer(pad=pad)
    data = prepare(CASES / "E01" / "data.jsonl", tokenizer, template=template)
    assert data.num_train_rows == 2
    for row in data.train:
        assert row["labels"].count(data.stop_token_id) == 1
        assert row["labels"][-1] == data.stop_token_id == row["input_ids"][-1]
        assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    assert data.trained_tokens == sum(len(trained(row)) for row in data.train)


def test_a_whole_row_keeps_its_stop_token_and_a_cut_one_gets_none():  # case E03
    data = prepare(CASES / "E03" / "data.jsonl", max_length=256)
    first, second = data.train
    assert first["labels"][-1] == data.stop_token_id
    assert second["length"] == 256
    assert data.stop_token_id not in second["labels"]
    assert data.num_truncated_rows == 1
    assert data.num_dropped_rows == 0
    assert data.response_tokens_lost == data.longest_row - 256


def test_rows_without_any_response_left_are_refused_with_the_limit():  # case N01
    text = refusal(CASES / "N01" / "data.jsonl", max_length=128)
    assert "data.max_length" in text
    assert "each of the 4 usable rows loses its whole response at max_length 128" in text


def test_every_row_is_kept_cut_or_dropped_and_counted():  # case N03
    data = prepare(CASES / "N03" / "data.jsonl", max_length=256)
    assert (data.num_rows, data.num_train_rows, data.num_dropped_rows, data.num_truncated_rows) == (4, 3, 1, 1)
    assert data.trained_tokens == sum(len(trained(row)) for row in data.train) > 0
    whole = [row for row in data.train if row["labels"][-1] == data.stop_token_id]
    assert len(whole) == 2


def test_a_cut_is_announced_with_what_it_costs_and_what_the_next_limit_would():
    data = prepare(CASES / "N03" / "data.jsonl", max_length=256)
    lost = data.response_tokens_lost
    assert data.notes[-1].startswith(
        f"data.max_length 256 cuts 1 and drops 1 of 4 rows (50.0%): {lost:,} response tokens lost; 512 would cut or"
    )
    [here] = [row for row in data.truncation_table if row.max_length == 256]
    assert (here.num_truncated_rows, here.num_dropped_rows, here.response_tokens_lost) == (1, 1, lost)
    assert [row.max_length for row in data.truncation_table][:4] == [32, 64, 128, 256]
    assert data.truncation_table[-1].max_length >= data.longest_row
    assert (data.truncation_table[-1].num_truncated_rows, data.truncation_table[-1].response_tokens_lost) == (0, 0)
    whole = prepare(CASES / "N03" / "data.jsonl", max_length=data.longest_row)
    assert whole.notes == ()
    for row in data.truncation_table:
        if row.max_length > 128:
            other = prepare(CASES / "N03" / "data.jsonl", max_length=row.max_length)
            counts = (other.num_truncated_rows, other.num_dropped_rows, other.response_tokens_lost)
            assert counts == (row.num_truncated_rows, row.num_dropped_rows, row.response_tokens_lost)


def test_more_cut_rows_than_allowed_are_refused_also_from_the_cache(cache):
    path = CASES / "N03" / "data.jsonl"
    assert prepare(path, max_length=256, max_truncated_fraction=0.5).num_truncated_rows == 1
    text = refusal(path, max_length=256, max_truncated_fraction=0.49)
    assert "data.max_truncated_fraction: data.max_length 256 cuts 1 and drops 1 of 4 rows (50.0%)" in text
    assert "0.49 of the rows may be; 512 would" in text
    assert len(made_folders(cache)) == 1


def test_longer_rows_are_dropped_whole_where_the_recipe_says_so(cache):
    path = CASES / "N03" / "data.jsonl"
    cut, dropped = (prepare(path, max_length=256, on_overflow=policy) for policy in ("truncate", "drop"))
    assert (dropped.num_train_rows, dropped.num_truncated_rows, dropped.num_dropped_rows) == (2, 0, 2)
    assert (
        dropped.train[:] == cut.train.select([index for index, row in enumerate(cut.train) if row["length"] < 256])[:]
    )
    assert dropped.trained_tokens + dropped.response_tokens_lost == cut.trained_tokens + cut.response_tokens_lost
    assert all(row["labels"][-1] == dropped.stop_token_id for row in dropped.train)
    text = refusal(path, max_length=4, on_overflow="drop")
    assert "each of the 4 usable rows is longer than max_length 4" in text
    assert len(made_folders(cache)) == 2


def test_longer_rows_are_refused_by_their_place_where_the_recipe_says_so(tmp_path, cache):
    rows = [ROWS[0], ROWS[1] | {"output": "one " * 300}, {"instruction": 1}, *[ROWS[2] | {"output": "two " * 200}] * 6]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {"max_length": 128, "max_bad_fraction": 0.2}
    lines = refusal(path, on_overflow="error", **options).splitlines()
    assert "data.max_length: 7 of 8 rows are longer than 128 tokens (the first 5 are listed; the longest" in lines[1]
    assert [line.split(": ")[0].strip() for line in lines[2:]] == [f"{path}:{line}" for line in (2, 4, 5, 6, 7)]
    assert all(" tokens" in line for line in lines[2:])
    assert made_folders(cache) == []
    assert prepare(write_jsonl(path, [ROWS[0]]), on_overflow="error", **options).notes == ()


def test_only_the_reply_and_its_end_are_trained():  # case M05
    tokenizer = build_tiny_tokenizer()
    rows = [json.loads(line) for line in (CASES / "M05" / "data.jsonl").read_text().splitlines()]
    for row, prepared in zip(rows, prepare(CASES / "M05" / "data.jsonl", tokenizer).train, strict=True):
        assert len(trained(prepared)) == len(tokenizer.encode(row["output"], add_special_tokens=False)) + 1
        assert tokenizer.decode(trained(prepared)) == row["output"] + "<|im_end|>"


def test_no_input_has_four_spellings_and_one_prompt():  # case D01
    tokenizer = build_tiny_tokenizer()
    for template in ("auto", "alpaca"):
        ids = [row["input_ids"] for row in prepare(CASES / "D01" / "data.jsonl", tokenizer, template=template).train]
        assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4]
        assert "Input" not in tokenizer.decode(ids[0])
        assert "None" not in tokenizer.decode(ids[0])
        assert "cat" in tokenizer.decode(ids[4])


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_neither_bom_nor_carriage_return_reaches_a_token(name):  # case D07
    tokenizer = build_tiny_tokenizer()
    data = prepare(CASES / "D07" / name, tokenizer)
    assert data.num_train_rows == 2
    text = "".join(tokenizer.decode(row["input_ids"]) for row in data.train)
    assert "\ufeff" not in text
    assert "\r" not in text


def reset_peak():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of this process can't be reset here")


def peak_mib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def test_one_huge_row_is_cut_in_little_memory(tmp_path):  # case D11
    short = json.loads((CASES / "D01" / "data.jsonl").read_text().splitlines()[1])
    huge = short | {"output": "one two three four five " * 8334}
    small = write_jsonl(tmp_path / "small.jsonl", [short] * 3)
    large = write_jsonl(tmp_path / "large.jsonl", [*[short] * 3, huge])
    prepare(small, max_length=128)
    reset_peak()
    before = peak_mib()
    data = prepare(large, max_length=128)
    assert max(data.train["length"]) == 128
    assert (data.num_truncated_rows, data.num_train_rows) == (1, 4)
    assert data.longest_row > 40_000
    assert peak_mib() - before < 200


def test_few_bad_rows_are_quarantined_counted_and_given_back(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:9], {"instruction": "a", "output": None}, 7])
    data = prepare(path, max_bad_fraction=0.2)
    assert (data.num_rows, data.num_bad_rows, data.num_train_rows) == (11, 2, 9)
    assert [row.where for row in data.quarantined] == [f"{path}:10", f"{path}:11"]
    write_quarantine(data, tmp_path / "quarantine.jsonl")
    entries = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert entries[0] == {"file": str(path), "line": 10, "field": "output", "reason": "output is null"}
    # The limit counts for data in the cache, too.
    assert "2 of 11 rows can't be used" in refusal(path)


def test_bad_rows_in_the_cache_carry_the_name_the_file_has_now(tmp_path, cache):
    for name in ("a.jsonl", "b.jsonl"):
        path = write_jsonl(tmp_path / name, [*ROWS[:9], 7])
        data = prepare(path, max_bad_fraction=0.2)
        assert data.quarantined[0].file == str(path)
    assert len(made_folders(cache)) == 1


def test_a_source_without_a_usable_row_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [7, 8])
    lines = refusal(path, max_bad_fraction=1.0).splitlines()
    assert "none of the 2 rows" in lines[1]
    assert [line.split(": ")[0].strip() for line in lines[2:]] == [f"{path}:1", f"{path}:2"]
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("m['content'] +", "m['content'][:30] +")
    path = write_jsonl(path, [{"instruction": "Hi", "output": "one " * 20}] * 2)
    lines = refusal(path, tokenizer=tokenizer, max_bad_fraction=1.0).splitlines()
    assert "none of the 2 rows can be used" in lines[1] and "shows none" in lines[1]
    assert f"{path}:1: the chat template changes or cuts the answer" in lines[2]


def test_the_split_is_exact_seeded_and_leaves_the_file_order(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:100])
    data = prepare(path, validation=0.1)
    assert (data.num_train_rows, data.num_eval_rows, len(data.train), len(data.evaluation)) == (90, 10, 90, 10)
    again = prepare(path, validation=0.1, seed=1)
    assert [row["input_ids"] for row in again.evaluation] != [row["input_ids"] for row in data.evaluation]
    whole = [row["input_ids"] for row in prepare(path).train]
    places = [whole.index(row["input_ids"]) for row in data.train]
    assert places == sorted(places)
    assert prepare(path).evaluation is None


def test_one_row_cannot_be_split(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:1])
    assert "data.validation: 0.5 of the rows can't be held out: there is only 1 row" in refusal(path, validation=0.5)
    assert prepare(write_jsonl(path, ROWS[:2]), validation=0.01).num_eval_rows == 1


def test_held_out_examples_are_prompts_as_generation_sees_them(tmp_path):
    tokenizer = build_tiny_tokenizer()
    rows = [row | {"input": f"text {number}"} for number, row in enumerate(ROWS[:50])]
    data = prepare(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer, validation=0.2, answer_rows=4)
    assert len(data.examples) == 4
    questions = {f"{row['instruction']}\n\n{row['input']}": row["output"] for row in rows}
    for example, row in zip(data.examples, data.evaluation, strict=False):
        assert questions[example.prompt] == example.answer
        message = [{"role": "user", "content": example.prompt}]
        seen = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert list(example.prompt_ids) == seen == row["input_ids"][: len(seen)]


def test_examples_belong_to_their_rows_where_others_were_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook.data.batches._BATCH_ROWS", 4)
    tokenizer = build_tiny_tokenizer()
    rows = [ROWS[number] | ({"input": "word " * 100} if number % 3 == 0 else {}) for number in range(40)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = prepare(path, tokenizer, validation=0.5, answer_rows=10, max_length=60)
    assert data.num_dropped_rows == 14
    assert len(data.examples) == 10
    for example in data.examples:
        message = [{"role": "user", "content": example.prompt}]
        seen = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert list(example.prompt_ids) == seen


def test_the_second_call_reads_what_the_first_made(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:20])
    first = prepare(path, validation=0.2)
    monkeypatch.setattr("tunebook.data.tokens.TurnEncoder.encode", None)
    second = prepare(path, validation=0.2)
    assert second.train[:] == first.train[:]
    assert second.examples == first.examples
    assert second.folder == first.folder
    assert len(made_folders(cache)) == 1


def test_tokens_whose_bytes_were_flipped_in_the_cache_are_made_again(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:20])
    first = prepare(path)
    rows, arrow = first.train[:], first.folder / "train.arrow"
    content = bytearray(arrow.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    arrow.write_bytes(content)
    assert prepare(path).train[:] == rows


def test_whatever_changes_the_tokens_makes_them_anew(tmp_path, cache):  # case C01
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:20])
    prepare(path)
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("m['content']", "'B ' + m['content']")
    assert "B Say 0" in tokenizer.decode(prepare(path, tokenizer).train[0]["input_ids"])
    prepare(path, template="alpaca")
    prepare(path, max_length=64)
    prepare(path, validation=0.5)
    prepare(path, validation=0.5, seed=1)
    prepare(path, build_tiny_tokenizer("metaspace"))
    write_jsonl(path, ROWS[:21])
    assert prepare(path).num_train_rows == 21
    assert len(made_folders(cache)) == 8


def test_a_template_that_writes_the_date_makes_the_data_anew_each_day(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:5])
    tokenizer = build_tiny_tokenizer()
    plain = prepare(path, tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    found = []
    for day in (1, 1, 2):
        monkeypatch.setattr("tunebook.data.prepare.today", lambda day=day: date(2030, 1, day))
        found.append(prepare(path, tokenizer))
    first, again, later = found
    assert first.folder == again.folder != later.folder
    assert len({data.data_fingerprint for data in (plain, first, again, later)}) == 3
    assert "the template writes today's date (2030-01-02)" in later.notes[0] and plain.notes == ()
    assert tokenizer.decode(first.train[0]["input_ids"]).startswith(f"{date.today():%d %b %Y}<|im_start|>")


def test_earlier_calls_of_the_tokenizer_do_not_move_the_cache(tmp_path, cache):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:5])
    tokenizer = build_tiny_tokenizer()
    prepare(path, tokenizer)
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=3)
    prepare(path, tokenizer)
    assert len(made_folders(cache)) == 1


def test_data_that_changes_under_the_reader_is_refused_and_not_cached(tmp_path, cache):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:5])

    def change(done, total):
        assert (done, total) == (5, 5)
        write_jsonl(path, ROWS[5:10])

    with pytest.raises(Refused, match="changed while it was being read"):
        prepare_data(build_recipe(path), build_tiny_tokenizer(), change)
    assert made_folders(cache) == []


def test_data_larger_than_the_disk_is_refused_before_it_fills(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    room = namedtuple("Usage", "free")(100_000)
    monkeypatch.setattr("tunebook.data.making.shutil.disk_usage", lambda folder: room)
    done = []
    with pytest.raises(Refused, match=r"the prepared data needs about \d+ KB more, and the disk has 100 KB left"):
        prepare_data(build_recipe(path), build_tiny_tokenizer(), lambda *rows: done.append(rows))
    assert done == [], "refused after the first thousand rows"
    assert made_folders(cache) == []


def test_a_file_that_the_system_will_not_let_grow_is_refused_and_removed(tmp_path, cache):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        text = refusal(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no space left for the prepared data: File too large" in text and "TUNEBOOK_CACHE" in text
    assert made_folders(cache) == []


def test_long_rows_go_through_in_small_batches(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:50])
    whole = prepare(path, validation=0.3)
    monkeypatch.setattr("tunebook.data.batches._BATCH_CHARS", 100)
    seen = []
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "other"))
    recipe = build_recipe(path, validation=0.3)
    small = prepare_data(recipe, build_tiny_tokenizer(), lambda done, total: seen.append((done, total)))
    assert small.train[:] == whole.train[:]
    assert seen[-1] == (50, 50)
    assert len(seen) > 10


CHILD = """
    import sys, time
    from tiny_data import build_recipe
    from tiny_models import build_tiny_tokenizer
    from tunebook.data.prepare import prepare_data

    def report(done, total):
        print("done", done, total, flush=True)
        time.sleep(float(sys.argv[2]))

    data = prepare_data(build_recipe(sys.argv[1], validation=0.1), build_tiny_tokenizer(), report)
    print("rows", len(data.train), len(data.evaluation), data.trained_tokens, flush=True)
"""


def start_preparing(path, seconds_per_batch):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path), str(seconds_per_batch)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_preparation_is_not_trusted_and_two_at_once_do_the_work_once(tmp_path, cache):  # case C04
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    killed = start_preparing(path, 600)
    assert killed.stdout.readline() == "done 1000 2000\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert ".partial-" in made_folders(cache)[0]
    both = [start_preparing(path, 1) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=300)[0].splitlines() for process in both)
    assert outputs[0][:2] == ["done 1000 2000", "done 2000 2000"]
    assert outputs[1] == outputs[0][2:]
    assert outputs[1][0].startswith("rows 1800 200 ")
    assert len(made_folders(cache)) == 1
