"""`tunebook eval`: the run's own figures again, the same on any number of processes, and what it refuses."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from broken_off import summary_of
from finished_runs import finished_place
from fork_server import shared_server
from tunebook.data.prepare import prepare_data
from tunebook.data.tokenizer import tokenizer_of
from tunebook.errors import Refused
from tunebook.export.finished import open_finished
from tunebook.launching.world import World
from tunebook.training.batches import pad_right, tensors_of
from tunebook.using.evaluate import Evaluation, as_words, evaluate, measure_here
from tunebook.using.trained import load_trained

pytestmark = pytest.mark.slow

RUN = "runs/recipe"


@pytest.fixture
def place(monkeypatch):
    folder = finished_place()
    monkeypatch.setenv("TUNEBOOK_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    return folder


def measure(**wanted):
    return evaluate(RUN, Evaluation(**wanted), World())


def rows_with_others(folder):
    """Write rows of other forms and lengths than those of the run, one of them cut at the run's max_length of 256."""
    rows = [
        {"prompt": "Name a color.", "completion": "red"},
        {"prompt": "Count.", "completion": "one two three"},
        {"prompt": "Name a color again, and say more about it.", "completion": "blue " * 200},
        {"prompt": "Translate to French. cat", "completion": "chat"},
        {"prompt": "!", "completion": "?"},
    ]
    path = folder / "others.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_without_data_the_figures_are_those_of_the_run(place, tmp_path, capsys):
    summary = summary_of(place / RUN)
    out = tmp_path / "figures.json"
    measure_here(RUN, Evaluation(out=str(out)))
    measured = json.loads(out.read_text())
    before, after = measured["before"], measured["after"]
    assert after["loss"] == pytest.approx(summary["eval_loss"], abs=1e-6)
    assert before["loss"] == pytest.approx(summary["eval_loss_before"], abs=1e-6)
    assert abs(before["loss"] - after["loss"]) > 1e-2
    assert after["perplexity"] == pytest.approx(math.exp(summary["eval_loss"]), rel=1e-6)
    assert measured["num_rows"] == measured["num_answered"] == summary["num_eval_rows"]
    assert 0 <= after["exact_match"] <= 1 and 0 <= after["rouge_l"] <= 1
    shown = capsys.readouterr().out
    for text in ("before", "after", f"{after['loss']:.4f}", f"{before['perplexity']:.4f}", "exact match", "ROUGE-L"):
        assert text in shown


def test_two_processes_give_the_same_figures(place, tmp_path):
    data = rows_with_others(tmp_path)
    alone = measure(data=str(data))
    out = tmp_path / "figures.json"
    server = shared_server()
    environ = {"SCRIPT": "eval_story", "EVAL_DATA": str(data), "EVAL_OUT": str(out)}
    life = server.start([RUN], 2, place, tmp_path / "log", TUNEBOOK_CACHE=str(place / "cache"), **environ)
    server.wait(life)
    assert life.rank_codes() == [0, 0], life.output()[-3000:]
    together = json.loads(out.read_text())
    assert (together["num_rows"], together["num_labels"]) == (alone.num_rows, alone.num_labels) == (5, alone.num_labels)
    for moment, figures in (("before", alone.before), ("after", alone.after)):
        for name in ("loss", "perplexity", "exact_match", "rouge_l"):
            assert together[moment][name] == pytest.approx(getattr(figures, name), rel=1e-6), (moment, name)
    assert life.output().count("perplexity") == 1, "rank 0 alone prints"


def test_other_rows_are_labelled_and_weighed_as_in_training(place, tmp_path):
    measured = measure(data=str(rows_with_others(tmp_path)), before=False, answer_rows=2)
    assert measured.before is None
    assert (measured.num_rows, measured.num_truncated_rows, measured.num_answered) == (5, 1, 2)
    # Against transformers' own loss of each row, weighed by its labels.
    finished = open_finished(RUN)
    recipe = finished.recipe
    section = recipe.data.model_copy(update={"path": str(tmp_path / "others.jsonl"), "validation": 0.0})
    data = prepare_data(replace(recipe, data=section), tokenizer_of(recipe))
    model, total, num = load_trained(finished).model, 0.0, 0
    for row in data.train.select_columns(["input_ids", "labels"]):
        labels = sum(label != -100 for label in row["labels"])
        total += float(model(**tensors_of(pad_right([row]))).loss) * labels
        num += labels
    assert measured.num_labels == num
    assert measured.after.loss == pytest.approx(total / num, rel=1e-6)


def test_what_cannot_be_measured_is_refused(place, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "pictures.jsonl").write_text('{"picture": 1}\n')
    (tmp_path / "broken.jsonl").write_text('{"instruction": "a", "output": "b"}\n{"instruction": "a"}\n')
    too_long = {"instruction": "word " * 300, "output": "b"}
    (tmp_path / "long.jsonl").write_text(json.dumps(too_long) + "\n")
    for wanted, reason in (
        ({"data": str(tmp_path / "gone.jsonl")}, "gone.jsonl"),
        ({"data": ""}, "--data: is empty"),
        ({"data": str(tmp_path / "empty.jsonl")}, "the file is empty"),
        ({"data": str(tmp_path / "pictures.jsonl")}, "columns picture found"),
        ({"data": str(tmp_path / "broken.jsonl")}, "broken.jsonl:2: output is missing"),
        ({"data": str(tmp_path / "long.jsonl")}, "max_length 256"),
        ({"out": str(tmp_path)}, "is a folder"),
        ({"out": f"{RUN}/run_summary.json"}, "the run's own"),
    ):
        with pytest.raises(Refused) as refused:
            measure(**wanted)
        assert reason in refused.value.render()
    with pytest.raises(Refused, match=r"no run_summary\.json"):
        evaluate(str(tmp_path), Evaluation(), World())


def test_other_rows_never_point_at_the_recipe_of_the_run(place, tmp_path):
    """It is the one file there that must not be edited, and the command has no option for its limits."""
    rows = tmp_path / "rows.jsonl"
    for text, message in (
        ('{"instruction": "a", "output": "b"}\n{"instruction": "a"}\n', "1 of 2 rows can't be used"),
        (json.dumps({"instruction": "word " * 300, "output": "b"}) + "\n", "max_length 256"),
    ):
        rows.write_text(text)
        with pytest.raises(Refused) as refused:
            measure(data=str(rows))
        said = refused.value.render()
        assert "--data: " in said and message in said and "or take them out" in said
        assert "recipe.yaml" not in said and "data.max" not in said


def test_rows_that_are_not_those_of_the_run_are_refused(tmp_path, monkeypatch):
    folder = shutil.copytree(finished_place(), tmp_path / "place")
    monkeypatch.setenv("TUNEBOOK_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"instruction": "new", "output": "row"}\n')
    with pytest.raises(Refused, match=r"not what the run was trained on.*--data FILE"):
        measure()
    summary = folder / RUN / "run_summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "status": "interrupted"}))
    with pytest.raises(Refused, match="the run is interrupted"):
        measure()


def test_each_process_of_a_launch_is_asked_for_the_same():
    wanted = Evaluation("rows.jsonl", False, "out.json", 0, 100)
    expected = "runs/x --no-before --data rows.jsonl --out out.json --answer-rows 0 --max-new-tokens 100"
    assert " ".join(as_words("runs/x", wanted)) == expected
    assert as_words("runs/x", Evaluation()) == ["runs/x", "--max-new-tokens", "256"]
