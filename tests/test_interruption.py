"""Signals, full disks and exhausted memory: what is on disk stays whole, the exit code tells, and nothing runs on."""

import json
import os
import signal
import time

import pytest

from broken_off import adapter_of, largest_difference, losses_of, steps_saved, summary_of
from test_resume import Place, same_result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("interruption"))


def until(life, text, place, seconds=60):
    """Wait until the life has printed a text."""
    deadline = time.monotonic() + seconds
    while text not in life.output():
        assert time.monotonic() < deadline and not life.is_over, life.output()[-3000:]
        place.server.poll(0.02)


LONG = ("training.num_train_epochs=2000", "training.save_steps=1000000", "data.answer_rows=0", "data.validation=0")


@pytest.mark.parametrize(("name", "size", "ranks"), [("SIGTERM", 1, [0]), ("SIGINT", 2, [1]), ("SIGUSR1", 2, [0])])
def test_a_signal_to_any_rank_saves_and_ends_all_of_them(place, name, size, ranks):
    life = place.begin(f"long-{name}", size, *LONG)
    until(life, "step 3/", place)
    sent = time.monotonic()
    for rank in ranks:
        os.kill(life.pids[rank], signal.Signals[name])
    place.server.wait(life)
    assert life.rank_codes() == [75] * size and max(life.ended.values()) - sent < 10
    run_dir = place.folder / f"long-{name}"
    [step] = steps_saved(run_dir)
    assert f"stopped by {name} at step {step} of 8000, and checkpoint-{step} is saved" in life.output()
    assert "Traceback" not in life.output()
    again = place.begin(run_dir.name, size, *LONG)
    until(again, f"step {step + 1}/8000", place)
    assert f"step {step}/8000" not in again.output()
    for pid in again.pids:
        os.kill(pid, signal.SIGKILL)
    place.server.wait(again)


def test_a_second_signal_ends_at_once(place):
    life = place.run(
        "twice", 1, FAULT="signal_in_window", FAULT_SIGNAL="SIGTERM", FAULT_STEP="4", FAULT_MICRO="1", FAULT_TIMES="2"
    )
    assert life.rank_codes() == [128 + signal.SIGTERM]
    assert "interrupted by SIGTERM a second time" in life.output() and steps_saved(place.folder / "twice") == [2, 4]


def test_a_signal_while_loading_ends_at_once_and_makes_nothing(place):
    life = place.run("loading", 1, FAULT="signal_while_loading", FAULT_SIGNAL="SIGINT")
    assert life.rank_codes() == [75] and "interrupted by SIGINT before training" in life.output()
    assert not (place.folder / "loading").exists()


@pytest.mark.parametrize(
    ("fault", "step", "saved"),
    [
        ("signal_in_evaluation", 3, 3),
        pytest.param("signal_in_evaluation", 0, 0, marks=pytest.mark.long),
        pytest.param("signal_in_last_answers", 9, 9, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_measuring_is_heard_and_the_measurement_made_later(place, fault, step, saved):
    for size in (1, 2):
        name = f"{fault}-{step}-{size}"
        asked = {"FAULT": fault, "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": str(step), "FAULT_RANKS": str(size - 1)}
        life = place.run(name, size, **asked)
        assert life.rank_codes() == [75] * size, life.output()[-3000:]
        assert steps_saved(place.folder / name)[-1:] == ([saved] if saved else [])
        assert place.run(name, size).rank_codes() == [0] * size
        same_result(place.folder / name, place.unbroken(size))


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
def test_an_evaluation_that_is_made_later_leaves_dropout_where_it_was(place, times):
    word = "lora.lora_dropout=0.1"
    asked = {"FAULT": "signal_in_evaluation", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": "3"}
    for size in (1, 2):
        name = f"later-{times}-{size}"
        for _ in range(times):  # the second time it is the evaluation that the first left to be made
            life = place.run(name, size, word, **asked)
            assert life.rank_codes() == [75] * size, life.output()[-3000:]
            assert "at step 3 of 9, and checkpoint-3 is saved" in life.output()
        assert place.run(name, size, word).rank_codes() == [0] * size
        same_result(place.folder / name, place.unbroken(size, word))


def test_a_signal_while_other_answers_are_written_says_where_the_run_stands(place):
    asked = {"FAULT": "signal_in_window", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": "4", "FAULT_MICRO": "1"}
    assert place.run("answers", 1, **asked).rank_codes() == [75]
    again = place.run("answers", 1, "data.answer_rows=1", FAULT="signal_in_first_answers", FAULT_SIGNAL="SIGTERM")
    assert again.rank_codes() == [75] and "[fault]" in again.output(), again.output()[-3000:]
    assert "stopped by SIGTERM at step 4 of 9, and checkpoint-4 is saved" in again.output()
    assert summary_of(place.folder / "answers")["num_optimizer_steps"] == 4


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_full_disk_is_said_and_the_checkpoint_before_it_used(place, file):
    name = f"full-{file[:3]}"
    life = place.run(name, 1, FAULT="break_saving", FAULT_FILE=file, FAULT_NTH="2", FAULT_MODE="enospc")
    assert life.rank_codes() == [1] and "[fault] rank 0 enospc" in life.output()
    assert "checkpoint-4 could not be saved: No space left on device" in life.output()
    assert "Traceback" not in life.output() and steps_saved(place.folder / name) == [2]
    assert summary_of(place.folder / name)["status"] == "failed"
    assert not list((place.folder / name / "checkpoints").glob(".*")), "the space is given back"
    again = place.run(name)
    assert again.rank_codes() == [0] and "after step 2 of 9" in again.output()
    same_result(place.folder / name, place.unbroken(1))


def test_a_full_disk_at_the_very_end_costs_the_last_file_alone(place):
    fault = {"FAULT": "break_saving", "FAULT_FILE": "adapter_model.safetensors", "FAULT_NTH": "6"}
    life = place.run("full-end", 2, FAULT_MODE="enospc", FAULT_RANKS="0", **fault)
    assert life.rank_codes() == [1, 1], life.output()[-3000:]
    assert "full-end/adapter could not be saved: No space left on device" in life.output()
    assert "Traceback" not in life.output() and summary_of(place.folder / "full-end")["status"] == "failed"
    assert not list((place.folder / "full-end").glob(".adapter*")), "the space is given back"
    again = place.run("full-end", 2)
    assert again.rank_codes() == [0, 0] and "after step 9 of 9" in again.output()
    same_result(place.folder / "full-end", place.unbroken(2))


@pytest.mark.long
@pytest.mark.parametrize("script", ["finetune", "train_ddp"])
def test_a_summary_that_cannot_be_written_is_said_before_training_and_after_it(place, script):
    # The first one says that the run is going on, the second how it ended, the third that it failed.
    for size, nth in ((1, 1), (2, 1), (2, 2)):
        name = f"summary-{script}-{size}-{nth}"
        fault = {"FAULT": "no_room_for_a_file", "FAULT_FILE": ".run_summary.json.writing", "FAULT_NTH": str(nth)}
        life = place.run(name, size, SCRIPT=script, **fault)
        assert life.rank_codes() == [1] * size, life.output()[-3000:]
        assert "could not be saved: No space left on device" in life.output() and "[fault]" in life.output()
        assert life.output().count("failed: ") == 1 and "Traceback" not in life.output()
        has_ended = nth == 2
        assert (f"The adapter in {name}/adapter is whole. Make room" in life.output()) == has_ended
        assert (place.folder / name / "adapter").is_dir() == has_ended
        if has_ended:
            assert largest_difference(adapter_of(place.folder / name), adapter_of(place.unbroken(2))) < 1e-6
        assert place.run(name, size, SCRIPT=script).rank_codes() == [0] * size
        assert largest_difference(adapter_of(place.folder / name), adapter_of(place.unbroken(size))) < 1e-6


def test_metrics_that_cannot_be_written_are_noted_once_and_the_run_goes_on(place):
    fault = {"FAULT": "no_room_for_a_file", "FAULT_FILE": "metrics.jsonl", "FAULT_NTH": "3", "FAULT_LAST": "4"}
    life = place.run("metrics", 2, **fault)
    assert life.rank_codes() == [0, 0], life.output()[-3000:]
    assert life.output().count("[fault]") == 2 and life.output().count("metrics.jsonl could not be saved") == 1
    assert largest_difference(adapter_of(place.folder / "metrics"), adapter_of(place.unbroken(2))) == 0
    known, expected = losses_of(place.folder / "metrics"), losses_of(place.unbroken(2))
    assert known.items() < expected.items(), "the others are there"


def test_a_file_that_the_system_cuts_short_fails_on_every_rank(place):
    life = place.run("short", 2, FAULT="no_room_for_files", FAULT_STEP="4", FAULT_BYTES="6000", FAULT_RANKS="0")
    assert life.rank_codes() == [1, 1], life.output()[-3000:]
    assert life.output().count("checkpoint-4 could not be saved") == 1 and "Traceback" not in life.output()
    assert place.run("short", 2).rank_codes() == [0, 0]
    same_result(place.folder / "short", place.unbroken(2))


@pytest.mark.parametrize(
    ("file", "mode"),
    [
        ("adapter_model.safetensors", "half"),
        ("rng_state_1.pth", "kill"),
        *(
            pytest.param(file, mode, marks=pytest.mark.long)
            for file, mode in (
                ("adapter_model.safetensors", "kill"),
                ("optimizer.pt", "kill"),
                ("optimizer.pt", "half"),
                ("rng_state_1.pth", "half"),
            )
        ),
    ],
)
def test_being_killed_while_saving_leaves_the_checkpoint_before(place, file, mode):
    name = f"killed-{file[:3]}-{mode}"
    fault = {"FAULT": "break_saving", "FAULT_FILE": file, "FAULT_NTH": "2", "FAULT_MODE": mode}
    life = place.run(name, 2, FAULT_RANKS="0", **fault)
    assert life.rank_codes()[0] == -signal.SIGKILL and life.rank_codes()[1] == 1, life.output()[-3000:]
    assert max(life.ended.values()) - min(life.ended.values()) < 30
    assert steps_saved(place.folder / name) == [2]
    again = place.run(name, 2)
    assert again.rank_codes() == [0, 0] and "after step 2 of 9" in again.output()
    same_result(place.folder / name, place.unbroken(2))


def test_running_out_of_memory_says_where_and_what_to_change(place):
    for size in (1, 2):
        life = place.run(f"memory-{size}", size, FAULT="out_of_memory", FAULT_NTH=str(16 // size - 1))
        assert life.rank_codes() == [1] * size and "Traceback" not in life.output()
        said = life.output()[life.output().index("failed: ") :]
        for part in (
            "out of memory at step 4: ", " rows of up to ", "per_device_train_batch_size 2",
            f"gradient_accumulation_steps {4 // size}", "float32", "training.per_device_train_batch_size: 1 (with "
            f"gradient_accumulation_steps {8 // size}", "global batch stays 8", "activation_checkpointing: true",
            "checkpoint-2", "data.max_length",
        ):  # fmt: skip
            assert part in said, (part, said)
        words = ["training.per_device_train_batch_size=1", "training.activation_checkpointing=true"]
        again = place.run(f"memory-{size}", size, *words)
        assert again.rank_codes() == [0] * size and "after step 2 of 9" in again.output()
        difference = largest_difference(adapter_of(place.folder / f"memory-{size}"), adapter_of(place.unbroken(size)))
        assert difference < 1e-6


@pytest.mark.parametrize("script", ["finetune", "train_ddp"])
def test_no_memory_for_the_model_is_said_with_what_needs_less(place, script):
    for size, ranks, mode, words in ((1, "0", "cuda", ()), (2, "0,1", "cpu", ("lora=null",)), (2, "1", "cuda", ())):
        name = f"no-memory-{script}-{size}-{mode}"
        fault = {"FAULT": "no_memory_for_the_model", "FAULT_MODE": mode, "FAULT_RANKS": ranks}
        life = place.run(name, size, *words, SCRIPT=script, **fault)
        assert life.rank_codes() == [1] * size, life.output()[-3000:]
        assert "Traceback" not in life.output() and not (place.folder / name).exists()
        assert max(life.ended.values()) - min(life.ended.values()) < 10
        speaker = "failed: rank 1: " if ranks == "1" else "failed: "
        assert life.output().count(f"{speaker}out of memory before step 1, while base was loaded") == 1
        said = life.output()[life.output().index(f"{speaker}out of memory") :]
        four_bits = "lora: {} and quantization: {load_in_4bit: true}" if words else "quantization: {load_in_4bit: true}"
        for part in (f"Less memory: {four_bits}; or a smaller model", f"{script}.py recipe.yaml --plan --gpu GIB"):
            assert part in said, (part, said)
        assert ("fewer than 2 processes" in said) == (size == 2)


def make_worsening(place, limit):
    """Write a recipe whose held-out loss is best early: its rate is far too high."""
    text = (place.folder / "recipe.yaml").read_text()
    text = text.replace("learning_rate: 1.0e-3", "learning_rate: 2.0\n  lr_scheduler_type: constant")
    text = text.replace("save_steps: 2", "save_steps: 1\n  eval_strategy: steps\n  eval_steps: 1")
    text += f"  load_best_model_at_end: true\n  save_total_limit: {limit}\n"
    (place.folder / f"worse-{limit}.yaml").write_text(text)
    return f"worse-{limit}.yaml"


@pytest.mark.parametrize("limit", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_best_checkpoint_is_kept_and_exported_exactly_also_after_a_stop(place, limit):
    from safetensors.torch import load_file

    recipe = make_worsening(place, limit)
    whole = place.run(f"best-{limit}", recipe=recipe)
    assert whole.rank_codes() == [0], whole.output()[-3000:]
    run_dir = place.folder / f"best-{limit}"
    newest = run_dir / "checkpoints" / f"checkpoint-{steps_saved(run_dir)[-1]}"
    state = json.loads((newest / "trainer_state.json").read_text())
    losses = {event["step"]: event["eval_loss"] for event in state["log_history"] if "eval_loss" in event}
    best = min((step for step in losses if step), key=lambda step: losses[step])
    assert best not in (0, 9), f"the best must not be the last: {losses}"
    assert steps_saved(run_dir) == [best, 9], "the best and the newest, whatever the limit"
    files = {step: run_dir / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors" for step in (best, 9)}
    # Copies, since what is loaded stays mapped to its file.
    adapters = {step: {name: one.clone() for name, one in load_file(file).items()} for step, file in files.items()}
    assert largest_difference(adapter_of(run_dir), adapters[best]) == 0
    assert largest_difference(adapter_of(run_dir), adapters[9]) > 0
    (run_dir / "run_summary.json").unlink()  # as after a SIGKILL before the adapter was written
    files[best].write_bytes(files[best].read_bytes()[:-1] + b"?")
    again = place.run(f"best-{limit}", recipe=recipe)
    assert again.rank_codes() == [0] and f"the best checkpoint is checkpoint-{best}, and there" in again.output()
    assert largest_difference(adapter_of(run_dir), adapters[best]) == 0
    stopped = place.run(f"best-{limit}-stopped", recipe=recipe, FAULT="signal_in_evaluation", FAULT_SIGNAL="SIGTERM",
                        FAULT_STEP=str(best))  # fmt: skip
    assert stopped.rank_codes() == [75], stopped.output()[-3000:]
    assert place.run(f"best-{limit}-stopped", recipe=recipe).rank_codes() == [0]
    assert largest_difference(adapter_of(place.folder / f"best-{limit}-stopped"), adapters[best]) == 0
