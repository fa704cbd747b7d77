"""`tunebook doctor`: versions against what is asked for, what is known to misbehave, and a real group of processes."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import tunebook.commands.doctor
from tunebook.commands.doctor import examine, find_known_bad, find_versions, has_avx512_bf16, tell_trial
from tunebook.commands.group_trial import Trial, try_group
from tunebook.launching.command import Surroundings


def children():
    """Return the processes that this one has started; the tests' server of ranks may be among them."""
    threads = Path("/proc/self/task").glob("*/children")
    return {pid for thread in threads for pid in thread.read_text().split()}


def test_what_is_installed_is_what_setup_cfg_asks_for():
    found = {finding.what: finding for finding in find_versions()}
    assert {"torch", "transformers", "peft", "bitsandbytes", "rich"} <= set(found)
    assert "pytest" not in found, "users need no development tools"
    assert not [finding for finding in found.values() if finding.kind == "bad"]


def test_another_version_and_a_missing_package_are_bad(monkeypatch):
    def other(name: str) -> str:
        if name == "peft":
            raise PackageNotFoundError(name)
        return "4.1.0" if name == "transformers" else version(name)

    monkeypatch.setattr(tunebook.commands.doctor, "version", other)
    found = {finding.what: finding for finding in find_versions()}
    assert found["transformers"].kind == found["peft"].kind == "bad"
    assert (
        "4.1.0, expected " in found["transformers"].text and "pip install 'transformers" in found["transformers"].text
    )
    assert "is not installed: pip install 'peft" in found["peft"].text


@pytest.mark.parametrize(
    ("around", "environ", "kind", "text"),
    [
        (Surroundings(), {}, "know", "starts ONE process"),
        (Surroundings(num_gpus=1, has_gpu_node=True), {}, "know", "starts ONE process"),
        (Surroundings(has_gpu_node=True), {}, "bad", "a GPU that torch cannot use"),
        (Surroundings(), {"ACCELERATE_MIXED_PRECISION": "bf16"}, "know", "ACCELERATE_MIXED_PRECISION=bf16"),
        (Surroundings(), {}, "know", "OMP_NUM_THREADS is not set"),
    ],
)
def test_what_is_known_to_misbehave_is_said(monkeypatch, around, environ, kind, text):
    monkeypatch.setattr(tunebook.commands.doctor, "look_around", lambda environ: around)
    assert [finding.kind for finding in find_known_bad(environ) if text in finding.text] == [kind]


def test_a_quiet_machine_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(
        tunebook.commands.doctor, "look_around", lambda environ: Surroundings(num_gpus=2, has_gpu_node=True)
    )
    monkeypatch.setattr(tunebook.commands.doctor, "has_avx512_bf16", lambda: False)
    assert find_known_bad({}) == []


def test_bitsandbytes_and_avx512_bf16(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags\t: avx512f avx512_bf16 avx512_vnni\n")
    assert has_avx512_bf16(tmp_path / "cpuinfo") and not has_avx512_bf16(tmp_path / "nowhere")
    (tmp_path / "cpuinfo").write_text("flags\t: avx512f\n")
    assert not has_avx512_bf16(tmp_path / "cpuinfo")
    monkeypatch.setattr(tunebook.commands.doctor, "has_avx512_bf16", lambda: True)
    assert any("guarded" in finding.text for finding in find_known_bad({}))


def test_a_group_that_fails_is_bad():
    finding = tell_trial(Trial(2, "gloo", 3.0, "rank 1 ended with 1: no route"))
    assert finding.kind == "bad" and "2 processes formed none here: rank 1 ended with 1: no route" in finding.text


@pytest.mark.slow
def test_a_real_group_is_formed_and_a_late_one_is_ended(monkeypatch, capsys):
    before = children()
    monkeypatch.setenv("RANK", "7")  # a launcher's leftovers must not matter
    assert examine(2, 60) == 0
    said = capsys.readouterr().out
    assert "ok   gloo group" in said and "2 processes of this machine formed one" in said
    assert "ok   torch" in said and "nothing found that would stop a run" in said
    late = try_group(2, "gloo", 0.2)
    assert "rank 0, 1 had not ended after 0.2 s" in late.failure and late.seconds < 5
    wrong = try_group(2, "smoke", 60)
    assert wrong.failure.startswith("rank 0 ended with 1: ") and "smoke" in wrong.failure
    assert children() == before, "none is left"
