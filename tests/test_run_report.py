"""The page about runs: what it says, what it leaves out, and where it may be written."""

import fcntl
import json
import math
import re
from html.parser import HTMLParser

import pytest

from past_run_folders import held_out, step, write_run
from tunebook.card.loss_picture import draw_losses, find_ticks
from tunebook.errors import Refused
from tunebook.runs.charts import MAX_POINTS, build_curves, build_histogram, nice_ticks, thin, tick_texts
from tunebook.runs.past import read_past_runs
from tunebook.runs.report import render_report, write_report


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and the points of each curve by chart and run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.words, self.points, self.chart = [], [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.elements.append((tag, given))
        if tag == "svg":
            self.chart = given.get("aria-label", "")
        if tag == "g":
            self.place = (self.chart, int(given["data-run"]))
            self.points[self.place] = 0
        if tag == "circle":
            self.points[self.place] += 1

    def handle_data(self, data):
        self.words.append(data)


def page_of(*folders):
    return Page(render_report(read_past_runs([str(folder) for folder in folders])))


def test_every_measured_step_is_a_point_and_runs_lie_over_each_other(tmp_path):
    events = [held_out(0, 6.0), *(step(number, tokens_per_second=10.0) for number in range(1, 10)), held_out(9, 4.0)]
    page = page_of(write_run(tmp_path / "one", events), write_run(tmp_path / "two", events[:4], "interrupted"))
    assert page.points["Loss", 0] == 9 and page.points["Loss", 1] == 3
    assert page.points["Held-out loss", 0] == 2 and page.points["Trained tokens a second, all processes", 0] == 9
    assert {"one", "two", "interrupted", "3"} <= {word.strip() for word in page.words}


def test_nothing_is_loaded_and_no_script_runs(tmp_path):
    page = page_of(write_run(tmp_path / "one", [step(1)]))
    names = {tag for tag, _ in page.elements}
    assert "svg" in names and not names & {"script", "link", "img", "iframe", "object", "base", "form"}
    values = [value for _, given in page.elements for name, value in given.items() if name in ("src", "href", "action")]
    assert values == []
    policies = [given["content"] for _, given in page.elements if given.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_text_is_escaped_and_control_characters_are_seen(tmp_path):
    evil = "</title></svg><script>alert(1)</script><img src=x onerror=alert(2)> \"'&"
    sample = {"prompt": evil, "answer": f"{evil}\x00\x1b[31m\ud800", "before": evil, "after": evil}
    recipe = json.dumps({"model": {"name_or_path": evil, evil: 1}})
    folder = write_run(tmp_path / "<script>alert(3)<", [step(1)], "failed", recipe, {"samples": [sample]}, error=evil)
    (folder / "run_summary.json").write_text(json.dumps({"status": evil, "error": evil, "versions": {evil: evil}}))
    page = page_of(folder, write_run(tmp_path / "plain"))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    text = "".join(page.words)
    assert text.count(evil) >= 8, "said as it is, in status, error, versions, recipe and sample"
    assert "\x00" not in text and "\x1b" not in text and "\u2400\u241b[31m?" in text


def test_a_step_that_two_lives_of_a_run_wrote_is_one_point_and_torn_lines_are_none(tmp_path):
    folder = write_run(tmp_path / "one", [step(1), step(2), step(3), step(2, loss=9.0), step(3), step(4)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": null}\n{"loss": 1}\n\n{"step": 5, "lo')
        file.write('\n{"step": 6, "loss": 1' + "0" * 400 + '}\n{"step": 1e999, "loss": 1}\n{"step": 7, "loss": true}')
    [run] = read_past_runs([str(folder)])
    assert run.curve("loss")[4:] == [(6, math.inf)]
    assert run.curve("loss")[:4] == [(1, 4.9), (2, 9.0), (3, 4.7), (4, 4.6)]


def test_numbers_that_are_none_break_the_line_and_are_said(tmp_path):
    events = [
        step(number, loss=math.nan if number in (3, 5) else 1e308 * 10 if number == 6 else 2.0)
        for number in range(1, 9)
    ]
    page = page_of(write_run(tmp_path / "one", events))
    assert page.points["Loss", 0] == 5
    assert any("no finite number at step 3, 5, 6" in word for word in page.words)
    lines = [given["points"] for tag, given in page.elements if tag == "polyline"]
    assert [line.count(",") for line in lines[:3]] == [2, 1, 2] and not any("nan" in line for line in lines)


@pytest.mark.parametrize("events", [[], [held_out(0, 3.0)], [step(1)], [step(1, loss=math.nan)]])
def test_runs_of_no_or_one_step_are_shown(tmp_path, events):
    page = page_of(write_run(tmp_path / "one", events, "interrupted"))
    assert any("nothing recorded" in word for word in page.words)
    assert "interrupted" in {word.strip() for word in page.words}


def test_a_run_that_says_running_is_broken_off_unless_someone_holds_its_folder(tmp_path):
    folder = write_run(tmp_path / "one", [step(1)], "running")
    assert read_past_runs([str(folder)])[0].status == "broken off"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_past_runs([str(folder)])[0].status == "running"


def test_runs_of_equal_names_are_told_apart_and_one_given_twice_is_one(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / name / "tiny", [step(1)]) for name in ("a", "b")]
    runs = read_past_runs([*map(str, folders), str(folders[0] / ".")])
    assert [run.name for run in runs] == ["tiny (1)", "tiny (2)"], "the folders above are this machine's"
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in read_past_runs(["a/tiny", str(folders[1])])] == ["a/tiny", "b/tiny"]
    monkeypatch.chdir(folders[0])
    assert [run.name for run in read_past_runs([".", "../../b/tiny"])] == ["tiny (1)", "tiny (2)"]


def test_only_keys_that_differ_are_compared_and_a_recipe_nobody_can_read_is_said(tmp_path):
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", recipe="model: {name_or_path: base}\ndata: {path: rows.jsonl}\nlora: {r: 8}\n")
    three = write_run(tmp_path / "three", recipe=": : not a recipe [")
    text = render_report(read_past_runs([str(one), str(two), str(three)]))
    compared = text[text.index(">differs<") : text.index("<details")]
    assert re.findall(r'<th scope="row">(.*?)</th>', compared) == ["training.learning_rate", "lora.r"]
    assert "No recipe could be read in three." in text
    assert "All 4 keys" in text


def test_files_that_hold_other_things_than_runs_write_are_shown_as_far_as_they_go(tmp_path):
    folder = write_run(
        tmp_path / "odd", [step(1)], trained_tokens=1.5, final_loss="low", versions=[1], wall_seconds=True
    )
    for odd in (
        "[1]",
        '{"lengths": {"start": 0}, "samples": [1, {"prompt": 2}], "tokens": "many"}',
        "{",
        '{"lengths": []}',
    ):
        (folder / "rows.json").write_text(odd)
        (folder / "plan.json").write_text(odd)
        assert page_of(folder).points["Loss", 0] == 1


def test_shares_are_of_all_positions(tmp_path):
    whole = write_run(tmp_path / "whole", trained_tokens=25, processed_tokens=100, padded_tokens=15)
    open_run = write_run(tmp_path / "open", status="interrupted", rows={"tokens": 50, "trained_tokens": 10})
    text = render_report(read_past_runs([str(whole), str(open_run)]))
    assert "100 positions: 25.0% trained, 60.0% read only, 15.0% padding" in text
    assert "50 positions: 20.0% trained, 80.0% read only, 0.0% padding" in text


def test_folders_without_a_run_are_refused_together(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused) as refused:
        write_report([str(tmp_path / "empty"), str(tmp_path / "none"), str(write_run(tmp_path / "run"))], "report.html")
    assert [problem.where for problem in refused.value.problems] == [str(tmp_path / "empty"), str(tmp_path / "none")]


def test_an_earlier_report_is_replaced_and_nothing_else(tmp_path):
    folder, place = write_run(tmp_path / "run", [step(1)]), tmp_path / "new" / "page.html"
    assert write_report([str(folder)], str(place)) == place
    assert write_report([str(folder), str(write_run(tmp_path / "other"))], str(place)) == place
    assert "other" in place.read_text()
    notes = tmp_path / "notes.html"
    notes.write_text("<p>mine")
    for taken, reason in ((notes, "no report of tunebook"), (tmp_path, "is a folder")):
        with pytest.raises(Refused, match=reason):
            write_report([str(folder)], str(taken))
    assert notes.read_text() == "<p>mine"
    with pytest.raises(Refused, match="cannot be written"):
        write_report([str(folder)], str(notes / "under" / "page.html"))


def test_of_many_points_the_extremes_stay():
    points = [(number, math.sin(number)) for number in range(100_000)]
    points[77_777] = (77_777, 9.0)
    kept = thin(points)
    assert len(kept) <= MAX_POINTS and kept[0] == points[0] and kept[-1] == points[-1]
    assert (77_777, 9.0) in kept and kept == sorted(kept)
    assert min(y for _, y in kept) == min(y for _, y in points)
    chart = build_curves("Loss", [(0, "run", points)])
    assert chart.curves[0].num_measured == 100_000 and len(chart.curves[0].dots) <= MAX_POINTS


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (5.9, 6.1), (1e-5, 2e-4), (3, 3), (0, 0), (-2, 7), (1e299, 2e299), (1e9, 1e9 + 1), (-5, -5)],
)
def test_ticks_are_round_cover_the_values_and_read_differently(low, high):
    ticks = nice_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 8 and ticks[0] <= low + abs(low) * 1e-9 and ticks[-1] >= high - abs(high) * 1e-9
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(texts) and max(map(len, texts)) <= 14


def test_bars_count_rows_by_length():
    chart = build_histogram("Rows", {"start": 80, "width": 20, "counts": [1, 0, 3]})
    assert [bar[-1] for bar in chart.bars] == [
        "80 to 99 tokens: 1 row", "100 to 119 tokens: 0 rows", "120 to 139 tokens: 3 rows",
    ]  # fmt: skip


# D1: what differs by rounding alone, or by less than an axis can show.
NEAR = [
    (4.1033, 4.103300000000001),
    (1.0, 1.0000000000000002),
    (3e9, 3e9 + 1e-6),
    (0.0, 5e-324),
    (-5e-324, 5e-324),
    (1e-310, 3e-310),
    (1e299, 1e299 * (1 + 1e-15)),
    (-2.0, -2.0000000000000004),
    (-9e299, 9e299),
]


@pytest.mark.parametrize(("low", "high"), NEAR)
def test_numbers_that_hardly_differ_are_drawn(low, high):
    for scale in (1.0, 0.01, 2.0**30):
        chart = build_curves("Held-out loss", [(0, "one", [(0, low)]), (1, "two", [(0, high)])], "", scale)
        texts = [tick.text for tick in chart.y_ticks]
        assert len(set(texts)) == len(texts) >= 2, texts
        assert all(10 <= dot.y <= 200 for curve in chart.curves for dot in curve.dots)
    assert find_ticks(low, high)[0] < find_ticks(low, high)[-1]


def test_the_picture_of_a_card_is_drawn_of_numbers_that_hardly_differ():
    for low, high in NEAR:
        assert draw_losses([{"step": 1, "loss": low, "eval_loss": high}])


# C1
def test_no_place_of_this_machine_and_no_token_is_on_the_page(tmp_path):
    secret, token = tmp_path / "alice" / "secret-project", "hf_abcdefghijklmnopqrstuvwxyz"
    recipe = {
        "model": {"name_or_path": f"{secret}/base"},
        "data": {"sources": [{"path": f"{secret}/rows.jsonl"}, {"path": f"file://{secret}/more.jsonl"}]},
        "training": {"run_name": f"as {secret}/x says, {token}"},
    }
    values = {
        "model": f"{secret}/base",
        "error": f"cannot read '{secret}/my rows.jsonl': see {secret}/log.txt:3 and https://me:pass@host/x, {token}",
        "hardware": f"{secret}/gpu",
        "versions": {"tunebook": f"0.1 of file://{secret}/tunebook"},
    }
    folders = [write_run(secret / name / "tiny", [step(1)], "failed", json.dumps(recipe), **values) for name in "ab"]
    text = render_report(read_past_runs([str(folder) for folder in folders]))
    for word in ("secret-project", "alice", str(tmp_path), token, "me:pass"):
        assert word not in text, word
    for word in ("base", "rows.jsonl", "more.jsonl", "my rows.jsonl", "log.txt:3", "hf_***", "tiny (1)"):
        assert word in text, word


# D6
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e300", "-1e300", "1" + "0" * 400, "-1", "0.5"])
def test_numbers_that_no_run_has_are_no_reason_to_stop(tmp_path, number):
    names = (
        *("wall_seconds", "peak_memory_bytes", "tokens_per_second", "final_loss", "learning_rate", "seed"),
        *("eval_token_accuracy", "trained_tokens", "processed_tokens", "padded_tokens", "num_optimizer_steps"),
        *("num_train_rows", "num_quarantined_rows", "global_batch_size", "world_size"),
        *("per_device_train_batch_size", "gradient_accumulation_steps"),
    )
    folder = write_run(tmp_path / "odd", [step(1)])
    summary = ", ".join(f'"{name}": {number}' for name in names)
    (folder / "run_summary.json").write_text(f'{{"status": "completed", {summary}}}')
    (folder / "plan.json").write_text(f'{{"num_optimizer_steps": {number}}}')
    measured = ", ".join(f'"{key}": {number}' for key in ("loss", "eval_loss", "memory_bytes", "grad_norm"))
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2.0}}\n{{"step": {number}, {measured}}}\n')
    for lengths in (f'"start": {number}, "width": 1, "counts": [1]', f'"start": 0, "width": {number}, "counts": [2]'):
        for counts in (f"[{number}, 1]", "[1]"):
            changed = lengths.replace("[1]", counts)
            (folder / "rows.json").write_text(f'{{"lengths": {{{changed}}}, "tokens": {number}, "trained_tokens": 1}}')
            page = page_of(folder)
            assert page.points["Loss", 0] >= 1
            assert not any("nan" in value for _, given in page.elements for value in given.values() if value)


@pytest.mark.parametrize(
    "recipe",
    ["a: &a {x: *a}", "a: &a [*a]", "[" * 500, "d: 2024-99-99", "? [1]\n: 2", "a: {? [1] : 2}", "? {a: 1}\n: 2"],
)
def test_recipes_and_lines_that_hold_themselves_or_too_much_are_left_out(tmp_path, recipe):
    folder = write_run(tmp_path / "odd", [step(1)], recipe=recipe)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"step": ' + "[" * 100_000 + "\n")
    for name in ("rows.json", "plan.json"):
        (folder / name).write_text("[" * 100_000)
    assert page_of(folder).points["Loss", 0] == 1
    (folder / "run_summary.json").write_text("[" * 100_000)
    with pytest.raises(Refused, match="no run_summary"):
        read_past_runs([str(folder)])


def test_characters_that_turn_or_hide_a_text_are_seen_and_those_that_scripts_need_stay(tmp_path):
    told = "a\u202eb\u2066c\u200bd\u2028e\x85f\ufeff"
    kept = "\u05e9\u05dc\u05d5\u05dd \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f468\u200d\U0001f469"
    sample = {"prompt": told, "answer": kept, "before": told, "after": told}
    folder = write_run(tmp_path / "run", [step(1)], rows={"samples": [sample]}, error=told)
    (folder / "recipe.yaml").write_text(json.dumps({"model": {"name": told}}))
    text = render_report(read_past_runs([str(folder)]))
    assert text.count("a[U+202E]b[U+2066]c[U+200B]d[U+2028]e[U+0085]f[U+FEFF]") == 5 and kept in text
    assert not set(told) & set(text) - set("abcdef")
