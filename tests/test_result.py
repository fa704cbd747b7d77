"""The end of a run: numbers before and after, and answers."""

import json
from pathlib import Path

import pytest

import training_scenarios
from tiny_training import TinyExample, build_base, build_data
from tunebook.errors import TrainingFailed
from tunebook.launching.process_group import process_group, start_process_group, stop_process_group
from tunebook.launching.world import World
from tunebook.training.result import render_result_table, shorten
from tunebook.training.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("result")
    build_base(folder / "base")
    start_process_group(World())
    run = training_scenarios.run_of(folder, World(), "run", build_data(num_examples=5), max_steps=1)
    yield train(run)
    stop_process_group()


def test_the_table_shows_losses_matches_and_three_answers(result):
    table = render_result_table(result, width=100)
    summary = result.summary
    assert f"{summary.eval_loss_before:.4f}" in table and f"{summary.eval_loss:.4f}" in table
    assert "exact matches" in table and table.count("0/5") == 2
    shown = [example for example in result.run.data.examples if shorten(example.prompt)[:6] in table]
    assert len(shown) == 3
    assert all(len(line) <= 100 for line in table.splitlines())
    assert "\x1b" not in table


def test_long_and_strange_texts_stay_on_one_short_line():
    assert shorten("a  b\n\tc\x1b[31m") == "a b c\N{REPLACEMENT CHARACTER}[31m"
    long = shorten("start " + "x" * 500 + " end")
    assert len(long) <= 60 and long.startswith("start ") and long.endswith(" end") and " ... " in long


def test_markup_in_an_answer_is_text(result):
    examples = (TinyExample("[bold]prompt[/bold]", [1], "[red]"),)
    data = training_scenarios.build_data(num_examples=1)
    changed = type(data)(data.train, data.evaluation, examples)
    run = type(result.run)(**{**vars(result.run), "data": changed})
    held = type(result.before)(1.0, ("[/nonsense]",), 0)
    table = render_result_table(type(result)(run, result.summary, held, held, ()))
    assert "[bold]prompt[/bold]" in table and "[red]" in table and "[/nonsense]" in table


def test_a_run_that_diverged_hands_out_no_adapter(tmp_path):
    build_base(tmp_path / "base")
    with process_group(World()):
        run = training_scenarios.run_of(tmp_path, World(), "run", build_data(), max_steps=1, learning_rate=1e38)
        with pytest.raises(TrainingFailed, match=r"Lower training\.learning_rate"):
            train(run)
    summary = json.loads((Path(run.plan.run_dir) / "run_summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1) and "TrainingFailed" in summary["error"]
    assert not Path(run.plan.adapter_dir).exists()
