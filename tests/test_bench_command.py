"""`tunebook bench`: a recipe run with several seeds, and what plans and later runs make of the receipt it writes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from finished_runs import finished_place, train_in
from fork_server import shared_server
from tunebook.errors import Refused
from tunebook.recipe.reading import load_recipe
from tunebook.runs.past import read_past_runs
from tunebook.runs.receipts import compare_with_receipt, read_receipt, write_receipt


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of a folder with a finished run, as the current folder; launches go through the server of ranks."""
    folder = tmp_path / "place"
    shutil.copytree(finished_place(), folder)
    monkeypatch.chdir(folder)
    started, weights = [], []

    def launch(script, words, num_processes):
        started.append(list(words))
        server, log = shared_server(), folder / "launched.log"
        environ = {"TUNEBOOK_CACHE": str(folder / "cache")}
        weights.append(sorted(path.parent.parent.name for path in Path(words[-1]).parent.glob("*/*/*.safetensors")))
        life = server.wait(server.start(list(words), num_processes, folder, log, **environ))
        return max(life.rank_codes())

    monkeypatch.setattr("tunebook.launching.launch.launch", launch)
    return folder, started, weights


@pytest.mark.slow
def test_a_recipe_is_run_with_each_seed_and_later_runs_are_held_against_it(place, capsys):
    from tunebook.commands.bench import bench

    folder, started, weights = place
    assert bench("recipe.yaml", (), 1, 3) == 0
    assert weights == [[], [], []], "a run's weights are gone before the next one starts"
    assert capsys.readouterr().out.startswith("receipt: recipe.receipt.json\n")
    assert [words[3] for words in started] == [f"training.seed={seed}" for seed in (42, 43, 44)]
    assert not any(Path(words[-1]).exists() for words in started), "their folders are deleted"
    [made] = read_receipt(folder / "recipe.receipt.json")
    assert made["seeds"] == [42, 43, 44] and made["num_processes"] == 1 and made["num_optimizer_steps"] == 9
    assert made["seconds_per_step"] > 0 and made["eval_loss"][0] != made["eval_loss"][1]
    assert made["tokens_per_second"]["least"] <= made["tokens_per_second"]["median"]

    assert len(made["loss_band"]) == 9
    other_seed = train_in(folder, "--fresh", "training.seed=50", "training.data_seed=42")
    assert other_seed.rank_codes() == [0]
    [earlier] = read_past_runs(["runs/recipe"])
    assert compare_with_receipt(folder / "recipe.receipt.json", earlier) == [], "a seed that the band was not made of"
    wrong = [(step, loss * (1 if step < 5 else 3)) for step, loss in earlier.curve("loss")]
    replaced = replace(earlier, events=tuple({"step": step, "loss": loss} for step, loss in wrong))
    assert "the loss of steps 5 to 5 is " in compare_with_receipt(folder / "recipe.receipt.json", replaced)[0]
    changed = {**made, "loss_band": [{**part, "loss": [9.0, 9.5]} for part in made["loss_band"]]}
    changed["tokens_per_second"] = {**made["tokens_per_second"], "median": 1e9}
    write_receipt(folder / "recipe.receipt.json", changed)
    life = train_in(folder, "--fresh")
    assert life.rank_codes() == [0]
    said = life.output()
    assert "note: the loss of steps 1 to 1 is " in said
    assert "out of the band of recipe.receipt.json: 9.0000 to 9.5000" in said
    assert "trained tokens per second, where recipe.receipt.json has 1,000,000,000 on the same hardware" in said
    other = train_in(folder, "--run-dir", "runs/other", "training.learning_rate=2e-3")
    assert other.rank_codes() == [0] and "receipt" not in other.output().split("--run-dir")[-1], "other values"


@pytest.mark.slow
def test_a_run_that_completed_is_not_failed_by_a_receipt_that_cannot_be_read(place):
    folder, *_ = place
    path = folder / "recipe.receipt.json"
    for content in ("<<<<<<< ours\n", '{"measured": [{"identity": {}, "loss_band": []}]}'):
        path.write_text(content)
        (folder / "finetune.log").unlink()
        life = train_in(folder, "--fresh", "data.answer_rows=0")
        said = life.output()
        assert life.rank_codes() == [0], said[-3000:]
        assert "note: recipe.receipt.json: is no receipt that can be read" in said
        assert "adapter: runs/recipe/adapter" in said and "Traceback" not in said
        assert path.read_text() == content


@pytest.mark.slow
def test_the_plan_takes_its_hours_from_the_receipt_and_a_failed_bench_writes_none(place, capsys, monkeypatch):
    from tunebook.commands.bench import bench
    from tunebook.launching.command_line import read_command
    from tunebook.plan.planning import show_plan

    folder, *_ = place
    [run] = read_past_runs(["runs/recipe"])
    from tunebook.runs.receipts import build_entry

    write_receipt(folder / "recipe.receipt.json", {**build_entry([run], [42]), "seconds_per_step": 7.25})
    words = ["recipe.yaml", "--plan", "--json", "--num-processes", "1", "--device", "cpu", "--run-dir", "runs/new"]
    monkeypatch.setenv("TUNEBOOK_CACHE", str(folder / "cache"))
    show_plan(load_recipe("recipe.yaml"), read_command(words))
    time = json.loads(capsys.readouterr().out)["time"]
    assert time["step_seconds"] == 7.25 and "recipe.receipt.json" in time["source"]
    before = (folder / "recipe.receipt.json").read_bytes()
    monkeypatch.setattr("tunebook.launching.launch.launch", lambda *words: 75)
    assert bench("recipe.yaml", (), 1, 3) == 75
    said = capsys.readouterr().err
    assert "no receipt is written: the run with seed 42 did not end. No run of a bench is kept" in said
    assert (folder / "recipe.receipt.json").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "seeds"),
    [
        ([], [42, 42]),
        (["training.seed=7"], [7, 7]),
        (["training.data_seed=7"], [42, 7]),
        (["training.data_seed=9", "training.seed=7"], [7, 9]),
        (["hub.repo=me/mine", "hub.private=false"], [42, 42]),
        (["hub=null"], [42, 42]),
        (["hub={repo: me/mine}", "training.seed=7"], [7, 7]),
    ],
    ids=str,
)
def test_what_bench_sets_itself_may_stand_on_its_command_line(tmp_path, monkeypatch, overrides, seeds):
    from tunebook.commands import cli
    from tunebook.launching.command_line import read_command

    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {name_or_path: org/base}\nlora: {r: 8}\ndata: {path: org/rows}\nhub: {repo: me/from-the-file}\n"
    )
    started = []

    def launch(script, words, num_processes):
        command = read_command(words)
        started.append(load_recipe(command.recipe, command.overrides))
        return 75

    monkeypatch.setattr("tunebook.launching.launch.launch", launch)
    monkeypatch.setattr("sys.argv", ["tunebook", "bench", str(path), *overrides])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    [recipe] = started
    assert ended.value.code == 75 and [recipe.seed, recipe.data_seed] == seeds and recipe.hub is None


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32 - 2])
def test_a_seed_that_would_be_too_large_is_refused_before_the_hours(tmp_path, monkeypatch, seed):
    from tunebook.commands.bench import bench

    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name_or_path: org/base}\nlora: {r: 8}\ndata: {path: org/rows}\n")
    started = []
    monkeypatch.setattr("tunebook.launching.launch.launch", lambda *words: started.append(words))
    with pytest.raises(Refused, match=r"training\.seed: got 429496729\d, expected a number from 0 to 4294967295"):
        bench(str(recipe), (f"training.seed={seed}",), 1, 3)
    assert not started


def test_a_folder_that_takes_no_receipt_is_refused_before_the_hours(tmp_path, monkeypatch):
    from tunebook.commands.bench import bench

    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name_or_path: org/base}\nlora: {r: 8}\ndata: {path: org/rows}\n")
    started = []
    monkeypatch.setattr("tunebook.launching.launch.launch", lambda *words: started.append(words))
    monkeypatch.setattr("os.access", lambda *asked: False)  # what root is told of a disk that is read-only
    with pytest.raises(Refused, match="cannot be written to, and the receipt would stand there"):
        bench(str(recipe), (), 1, 3)
    assert not started


@pytest.mark.slow
def test_what_was_measured_is_printed_where_the_receipt_cannot_be_written(place, capsys, monkeypatch):
    from tunebook.commands.bench import bench

    def fail(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tunebook.runs.receipts.write_whole", fail)
    with pytest.raises(Refused, match=r"recipe\.receipt\.json: cannot be written: .*No space left on device"):
        bench("recipe.yaml", (), 1, 1)
    printed = capsys.readouterr().out
    kept = json.loads(printed[printed.index("{") :])
    assert kept["seeds"] == [42] and not (place[0] / "recipe.receipt.json").exists()
