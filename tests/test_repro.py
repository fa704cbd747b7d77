"""A run that someone else left, started again: what is said before, what is refused, and what it is compared with."""

import json
import os
import shutil
from pathlib import Path

import pytest

from broken_off import make_place, summary_of
from finished_runs import finished_place, train_in
from fork_server import shared_server
from past_run_folders import RECIPE, write_run
from tunebook.errors import Refused
from tunebook.launching.world import world_of
from tunebook.runs import repro
from tunebook.runs.differences import compare_results, find_other_contents
from tunebook.runs.past import read_past_runs

pytestmark = pytest.mark.slow

RUN = "runs/recipe"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of a folder with a finished run, as the current folder; launches go through the server of ranks."""
    folder = tmp_path / "place"
    shutil.copytree(finished_place(), folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TUNEBOOK_CACHE", str(folder / "cache"))

    def launch(script, words, num_processes):
        server, log = shared_server(), folder / "launched.log"
        environ = {"SCRIPT": Path(script).stem, "TUNEBOOK_CACHE": str(folder / "cache")}
        life = server.wait(server.start(list(words), num_processes, Path.cwd(), log, **environ))
        return max(life.rank_codes())

    monkeypatch.setattr("tunebook.launching.launch.launch", launch)
    return folder


def again(run=RUN, *overrides, target=None, processes=None, anyway=False, dry_run=True):
    return repro.reproduce(str(run), overrides, target, processes, anyway, dry_run)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def change_summary(run, **values):
    path = Path(run) / "run_summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def problems_of(*words, **options):
    with pytest.raises(Refused) as refused:
        again(*words, **options)
    return [problem.render() for problem in refused.value.problems]


def test_the_run_again_gives_the_same_adapter_and_leaves_the_folder_as_it_was(place, capsys):
    before = contents(RUN)
    assert again(dry_run=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "runs/recipe again, in runs/recipe-repro"
    assert said[1].startswith("the same: data, base, tokenizer and all values that the result depends on, device cpu, ")
    assert said[2:] == [
        "the same adapter, bit for bit",
        f"loss at step 9: {summary_of(Path(RUN))['final_loss']:.6g} there, "
        f"{summary_of(Path(RUN))['final_loss']:.6g} here, equal",
        f"held-out loss at step 9: {summary_of(Path(RUN))['eval_loss']:.6g} there, "
        f"{summary_of(Path(RUN))['eval_loss']:.6g} here, equal",
    ]
    assert contents(RUN) == before
    assert summary_of(place / "runs/recipe-repro")["adapter_sha256"] == summary_of(Path(RUN))["adapter_sha256"]


def test_a_run_that_was_interrupted_is_begun_anew_on_other_processes_with_the_values_it_had(place, capsys):
    fault = {"FAULT": "signal_in_window", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": "5", "FAULT_MICRO": "1"}
    life = train_in(place, "--run-dir", "runs/short", "lora.r=2", **fault)
    assert life.rank_codes() == [75], life.output()[-3000:]
    assert again("runs/short", processes=2, dry_run=False) == 0
    said = capsys.readouterr().out
    assert "differs: processes: 1 there, 2 here" in said and "the same: data, base" in said
    assert "no adapter to compare with: the run there is interrupted, after step 5" in said
    assert "loss at step 5: " in said and "no identity.json" not in said
    assert json.loads((place / "runs/short-repro/plan.json").read_text())["num_optimizer_steps"] == 9


def test_another_value_is_refused_unless_allowed(place, capsys):
    words = ("training.learning_rate=2e-3",)
    [problem] = problems_of(RUN, *words, target="runs/other")
    assert "training.learning_rate: 0.001 there, 0.002 here" in problem and "--anyway" in problem
    assert again(RUN, *words, target="runs/other", anyway=True) == 0
    assert "differs: training.learning_rate: 0.001 there, 0.002 here" in capsys.readouterr().out
    assert not Path("runs/other").exists()


def test_how_far_another_adapter_is_off_is_said(place):
    from safetensors.torch import load_file, save_file

    shutil.copytree(RUN, "runs/other")
    weights = Path("runs/other/adapter/adapter_model.safetensors")
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 0.25
    save_file(tensors, weights)
    change_summary("runs/other", adapter_sha256="f" * 64)
    one, other = read_past_runs([RUN, "runs/other"])
    assert compare_results(one, other)[0] == "not the same bits: the weights differ by at most 0.25"
    weights.unlink()
    assert "is gone" in compare_results(other, one)[0]


def test_from_another_folder_base_and_data_are_pointed_to_and_compared_by_content(place, tmp_path, monkeypatch, capsys):
    moved = tmp_path / "handed over"
    shutil.copytree(place / RUN, moved / "recipe")
    monkeypatch.chdir(moved)
    base, data = problems_of("recipe")
    assert "tunebook repro recipe model.name_or_path=PLACE" in base and "was a folder there" in base
    assert "tunebook repro recipe data.path=PLACE" in data and "file rows.jsonl does not exist" in data
    found = problems_of(place / RUN)
    assert [line.partition("tunebook repro ")[2] for line in found] == [
        f"{place / RUN} model.name_or_path={place / 'base'}",
        f"{place / RUN} data.path={place / 'rows.jsonl'}",
    ]
    assert list(moved.iterdir()) == [moved / "recipe"]
    shutil.copy(place / "rows.jsonl", moved / "mine.jsonl")
    words = (f"model.name_or_path={place / 'base'}", "data.path=mine.jsonl")
    assert again("recipe", *words) == 0
    said = capsys.readouterr().out
    assert "the same: data, base, tokenizer" in said and "differs" not in said and f"with {words[0]}" in said


def test_other_rows_or_another_base_are_refused_unless_allowed(place, capsys):
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows.replace("red", "green"))
    make_place(place / "other", num_layers=1)
    found = problems_of(RUN, "model.name_or_path=other/base")
    assert [line.split(": ")[2] for line in found] == ["base", "data fingerprint"]
    assert not Path("runs/recipe-repro").exists()
    assert again(RUN, "model.name_or_path=other/base", anyway=True) == 0
    assert capsys.readouterr().out.count("differs: data fingerprint") == 2, "said before the refusal, too"


def test_versions_and_devices_that_differ_are_said_and_stop_nothing(place, capsys):
    versions = {**summary_of(Path(RUN))["versions"], "torch": "1.0", "gone": "7"}
    change_summary(RUN, versions=versions, hardware="NVIDIA H200", device="cuda", world_size=4096)
    assert again() == 0
    said = capsys.readouterr().out
    for expected in ("torch: 1.0 there, ", "gone: 7 there, none here", "hardware: NVIDIA H200 there", "device: cuda"):
        assert f"differs: {expected}" in said
    assert f"differs: processes: 4096 there, {min(os.cpu_count(), 4096)} here" in said


def test_a_batch_that_grew_with_the_processes_stays_what_it_was(place, capsys):
    """A classic pair and a scaled rate: four processes there, one here."""
    text = (Path(RUN) / "recipe.yaml").read_text()
    text = text.replace(
        "  global_batch_size: 8\n", "  gradient_accumulation_steps: 1\n  learning_rate_scaling: linear\n"
    )
    (Path(RUN) / "recipe.yaml").write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.00025"))
    change_summary(RUN, world_size=4)
    assert again(processes=1) == 0
    said = capsys.readouterr().out
    assert "the same: data, base" in said and "training.global_batch_size=8" in said
    assert "training.learning_rate=0.001" in said


def test_the_copy_is_apart_from_the_original(place):
    for target in (RUN, "runs/recipe/again", "runs", "./runs/../runs/recipe"):
        assert "stays as it is" in problems_of(target=target)[0]
    Path("link").symlink_to(place / RUN)
    assert "stays as it is" in problems_of(target="link")[0]


def test_folders_that_hold_no_run_to_start_are_refused(place, tmp_path, capsys):
    assert "no run_summary.json" in problems_of(tmp_path / "none")[0]
    (Path(RUN) / "second.yaml").write_text(RECIPE)
    assert "2 recipes are there" in problems_of()[0]
    (Path(RUN) / "second.yaml").unlink()
    (Path(RUN) / "identity.json").unlink()
    assert again() == 0
    assert "no identity.json tells" in capsys.readouterr().out


def test_a_copy_is_not_published_in_the_originals_place_and_its_base_is_that_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    text = "model: {name_or_path: org/base}\ndata: {path: org/rows}\nhub: {repo: me/mine}\n"
    [past] = read_past_runs([str(write_run(tmp_path / "run", recipe=text, model_revision=commit, world_size=1))])
    assert repro._left_out(past) == ("hub=null",)
    assert repro._pinned(past, world_of(1)) == (f"model.revision={commit}",)


def test_what_the_program_chose_then_is_set_now(tmp_path):
    text = "training: {per_device_train_batch_size: auto, activation_checkpointing: auto, global_batch_size: 8}\n"
    folder = write_run(tmp_path / "run", recipe=text, world_size=2)
    (folder / "plan.json").write_text('{"per_device_train_batch_size": 4, "activation_checkpointing": false}')
    [past] = read_past_runs([str(folder)])
    words = ("training.per_device_train_batch_size=4", "training.activation_checkpointing=false")
    assert repro._pinned(past, world_of(2)) == words
    assert repro._pinned(past, world_of(1)) == (), "in another world it is chosen anew"
    (folder / "plan.json").write_text("{}")
    [past] = read_past_runs([str(folder)])
    assert repro._pinned(past, world_of(2)) == ()


def test_keys_that_the_other_version_did_not_know_are_not_compared_unless_given():
    begun = {"data": "a" * 64, "lora.r": 4, "training.seed": 1}
    now = {"data": "b" * 64, "lora.r": 4, "lora.new": True, "training.seed": 1, "training.weight_decay": 0.1}
    found = find_other_contents(begun, now, [])
    assert [str(one) for one in found] == [
        f"data fingerprint: {'a' * 12} there, {'b' * 12} here",
        "training.weight_decay: nothing there, 0.1 here",
    ]
    assert [one.what for one in find_other_contents(begun, now, ["lora.new"])][1] == "lora.new"


def test_places_in_a_list_of_sources_are_pointed_to_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model: {name_or_path: org/base}\ndata: {sources: [{path: gone.jsonl}, {path: also/gone.jsonl}]}\n"
    write_run(tmp_path / "theirs", recipe=text)
    found = problems_of("theirs")
    assert len(found) == 2 and all("data.sources=[{path: PLACE}, ...]" in line for line in found)
