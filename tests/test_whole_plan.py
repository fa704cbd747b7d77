"""`--plan` on data and models that are here: what it says is what training does, and errors refuse."""

import importlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tiny_data import shared, write_jsonl
from tiny_models import build_tiny_model
from tunebook.errors import Refused
from tunebook.launching.command_line import read_command
from tunebook.plan import whole_plan_text

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
RECIPE = """model: {{name_or_path: {base}, dtype: float32}}
lora: {{r: 4, target_modules: {targets}}}
data: {{path: {data}, format: alpaca, max_length: {max_length}, validation: {validation}, max_bad_fraction: 0.5}}
training: {{global_batch_size: 8, per_device_train_batch_size: 2, num_train_epochs: 3}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def planned(tmp_path, base, monkeypatch, capsys):
    """Run `--plan` in this process on a recipe around the given rows; return what it printed."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(
        rows, *words: str, model: Path = base, targets="all-linear", max_length=200, validation=0.0, text=RECIPE
    ) -> str:
        data = rows if isinstance(rows, Path | str) else write_jsonl(tmp_path / "rows.jsonl", rows)
        fields = {"base": model, "data": data, "targets": targets, "max_length": max_length, "validation": validation}
        Path("case.yaml").write_text(text.format(**fields))
        importlib.import_module("finetune").finetune(read_command(("case.yaml", "--plan", *words)))
        return capsys.readouterr().out

    return run


def row(number: int, words: int = 3) -> dict[str, str]:
    return {"instruction": f"Count to {number}.", "output": " ".join(["one"] * words)}


def as_json(text: str) -> dict:
    return json.loads(text)


def test_the_numbers_are_those_of_the_rows(planned, base):
    from transformers import AutoTokenizer

    rows = [row(number, words=1 + number % 7) for number in range(30)] + [row(3, words=4)] + [{"instruction": "x"}]
    plan = as_json(planned(rows, "--json"))
    data = plan["data"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    whole, trained = [], []
    for each in rows[:-1]:
        messages = [{"role": "user", "content": each["instruction"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        trained.append(len(tokenizer.encode(each["output"] + "<|im_end|>", add_special_tokens=False)))
        whole.append(len(tokenizer.encode(prompt, add_special_tokens=False)) + trained[-1])
    assert (data["num_rows"], data["num_train_rows"], data["num_bad_rows"]) == (32, 31, 1)
    assert (data["length_max"], data["longest_row"]) == (max(whole), max(whole))
    assert sorted(whole)[15] == data["length_p50"] and data["length_p95"] in sorted(whole)[-4:]
    assert (data["trained_tokens"], data["all_tokens"]) == (sum(trained), sum(whole))
    assert data["trained_share"] == pytest.approx(sum(trained) / sum(whole))
    assert (data["num_equal_rows"], data["rows_with_stop"]) == (1, 31)
    assert (plan["num_train_rows"], plan["steps_per_epoch"], plan["num_optimizer_steps"]) == (31, 4, 12)
    kinds = [(finding["kind"], finding["message"].split()[0]) for finding in plan["findings"]]
    assert kinds == [("note", "turns"), ("warning", "1")]


def test_what_a_run_would_refuse_of_schedule_and_memory_the_plan_refuses(planned, monkeypatch):
    wrong = RECIPE.replace("num_train_epochs: 3", "num_train_epochs: 3, lr_scheduler_kwargs: {{nope: 1}}")
    with pytest.raises(Refused, match=r"training\.lr_scheduler_kwargs: .*'nope'"):
        planned([row(1), row(2)], text=wrong)
    monkeypatch.setenv("TUNEBOOK_MEMORY_GIB", "0.0001")
    words = ("--num-processes", "1", "--device", "cpu")
    assert "does not fit" not in planned([row(1), row(2)], *words), "a size that is given is not chosen"
    with pytest.raises(Refused, match=r"auto finds nothing that fits: .* allowed by TUNEBOOK_MEMORY_GIB"):
        planned([row(1), row(2)], *words, text=RECIPE.replace("batch_size: 2", "batch_size: auto"))


def test_padding_is_what_the_batches_of_all_ranks_have(planned):
    from tunebook.training.batches import FILLER_ROW, BatchLayout, GlobalBatchSampler

    rows = [row(number, words=1 + (number * 7) % 40) for number in range(61)]
    padding = as_json(planned(rows, "--json", "--num-processes", "2", "--device", "cpu"))["data"]["padding"]
    import pyarrow as pa

    (stored,) = Path("cache").rglob("train.arrow")
    lengths = pa.ipc.open_stream(stored.read_bytes()).read_all().column("length").to_pylist()
    positions = tokens = fullest = 0
    for rank in range(2):
        sampler = GlobalBatchSampler(lengths, BatchLayout(8, 2, 2, rank), 42)
        sampler.set_epoch(0)
        for batch in sampler:
            sizes = [lengths[number] for number in batch if number != FILLER_ROW]
            positions += len(sizes) * max(sizes, default=0)
            tokens += sum(sizes)
            fullest = max(fullest, len(sizes) * max(sizes, default=0))
    assert tokens == sum(lengths)
    assert padding["share"] == pytest.approx(1 - tokens / positions)
    assert padding["fullest"][0] * padding["fullest"][1] == fullest
    assert padding["share"] < padding["random_share"] < 0.8


def test_what_other_limits_would_cut(planned):
    rows = [row(1, words=words) for words in (1, 60, 90, 150)] + [{"instruction": "word " * 300, "output": "x"}]
    at = {}
    for limit in (1000, 128):
        limits = as_json(planned(rows, "--json", max_length=limit))["data"]["limits"]
        at[limit] = {each.pop("max_length"): each for each in limits}
    assert at[1000][1000] == {"num_truncated_rows": 0, "num_dropped_rows": 0, "response_tokens_lost": 0}
    # What a long limit predicts for a short one is what that one does.
    assert at[1000][128] == at[128][128]
    assert at[128][128]["num_dropped_rows"] == 1 and at[128][128]["num_truncated_rows"] == 1


def test_three_rows_as_text_with_marks(planned):
    shown = planned([row(number) for number in range(20)])
    lines = shown.splitlines()
    assert sum(line.startswith("training row ") for line in lines) == 3
    trained = [line for line in lines if line.startswith("  + ")]
    assert trained == ["  + one one one<|im_end|>"] * 3
    assert all(line.endswith("<|im_start|>assistant\\n") for line in lines if line.startswith("  | "))
    assert "\x1b" not in shown


@pytest.mark.parametrize("color_system", ["standard", None])
def test_a_terminal_of_80_columns(planned, monkeypatch, color_system):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=color_system)
    monkeypatch.setattr(whole_plan_text, "build_console", lambda: console)
    planned([row(number) for number in range(20)], "--gpu", "24", "--step-seconds", "0.8")
    lines = console.file.getvalue().splitlines()
    if color_system:
        assert any(line.startswith("\x1b[1;32m  + ") for line in lines)
        return
    # Tables are laid out for the width; whole sentences and rows are left to the terminal to wrap.
    tables = [line for line in lines if line.startswith(" ") and not line.startswith(("  + ", "  | "))]
    assert max(map(len, tables)) <= 80 and "\x1b" not in "".join(lines)
    assert {line.split()[0] for line in tables if line.split()} >= {"data", "max_length", "memory", "weights", "recipe"}


def test_several_files_are_counted_one_by_one(planned, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [row(number) for number in range(12)])
    write_jsonl(folder / "b.jsonl", [row(number) for number in range(20, 25)])
    found = as_json(planned(folder, "--json"))["data"]["rows_by_source"]
    assert [(Path(name).name, count) for name, count in found] == [("a.jsonl", 12), ("b.jsonl", 5)]


SEVERAL = RECIPE.replace("path: {data}, format: alpaca", "sources: {data}, deduplicate: {targets}")
SEVERAL = SEVERAL.replace("target_modules: {targets}", "target_modules: all-linear")


@pytest.mark.parametrize("deduplicate", [True, False])
def test_every_row_is_in_the_sum_and_copies_are_no_equal_rows(planned, tmp_path, deduplicate):
    twice = [row(number) for number in range(10)] + [row(3), {"instruction": "x"}]
    long = [row(number) for number in range(20, 29)] + [{"instruction": "word " * 300, "output": "x"}]
    places = [write_jsonl(tmp_path / name, rows) for name, rows in (("a.jsonl", twice), ("b.jsonl", long))]
    sources = json.dumps([{"path": str(path), "weight": weight} for path, weight in zip(places, (2, 0.7), strict=True)])
    settings = {"targets": str(deduplicate).lower(), "validation": 0.2, "text": SEVERAL}
    plan = as_json(planned(sources, "--json", **settings))
    data = plan["data"]
    used = data["num_train_rows"] + data["num_eval_rows"]
    left_out = sum(data[f"num_{kind}_rows"] for kind in ("dropped", "bad", "duplicate", "unused"))
    assert (data["num_rows"], data["num_bad_rows"], data["num_unused_rows"]) == (22, 1, 3)
    assert (data["num_duplicate_rows"], data["num_repeated_rows"]) == ((1, 10) if deduplicate else (0, 11))
    assert data["num_rows"] + data["num_repeated_rows"] + data["num_split_rows"] == used + left_out
    assert data["num_equal_rows"] == (0 if deduplicate else 1)
    assert [each["key"] for each in plan["findings"]].count("data.deduplicate") == (not deduplicate)
    shown = " ".join(planned(sources, **settings).split())
    assert f"added {data['num_repeated_rows']} repeated by weight" in shown and "not used 3 not drawn" in shown
    assert ("not used 1 like an earlier row" in shown) == deduplicate
    assert f"form {data['forms'][0]}" in shown


# Errors


def refusal(planned, *args, **kwargs) -> str:
    with pytest.raises(Refused) as refused:
        planned(*args, **kwargs)
    return str(refused.value)


def test_no_stop_token_in_the_labels_is_refused(planned):
    message = refusal(planned, [row(number, words=300) for number in range(9)], max_length=64)
    assert "no row trains <|im_end|>" in message and "data.max_length" in message and "case.yaml:3" in message


def test_a_stop_token_that_generation_may_not_use_is_refused(planned, base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"suppress_tokens": [2], "bad_words_ids": [[5], [2]]}))
    message = refusal(planned, [row(number) for number in range(9)], model=model)
    assert "suppress_tokens" in message and "bad_words_ids" in message and "Remove 2" in message


def test_a_base_that_stops_elsewhere_is_noted(planned, base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    findings = as_json(planned([row(number) for number in range(9)], "--json", model=model))["findings"]
    assert [(each["kind"], "<|im_end|>" in each["message"]) for each in findings] == [("note", True)]


def test_targets_that_match_nothing_are_refused_and_the_plan_is_shown(planned, capsys):
    message = refusal(planned, [row(number) for number in range(9)], "--json", targets="[q_proj, v_pro]")
    assert "v_pro matches no module" in message and "v_proj" in message
    plan = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in plan["findings"]] == ["error", "note"]


def test_a_tokenizer_of_another_vocabulary_is_refused(planned, base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    assert "the embedding of" in refusal(planned, [row(number) for number in range(9)], model=model)


LONG = [row(number, words=1 + number * 20) for number in range(9)]
BAD = [*LONG, {"instruction": "x"}]
REFUSED = {
    "cut": (LONG, ("data.max_truncated_fraction=0.1",), "data.max_truncated_fraction", 9),
    "long": (LONG, ("data.on_overflow=error",), "data.max_length", 9),
    "bad": (BAD, ("data.max_bad_fraction=0",), "data.max_bad_fraction", 9),
    "all bad": ([{"instruction": "x", "output": 3}] * 3, (), "data.max_bad_fraction", None),
    "no column": ([{"what": "x"}] * 3, (), "data.format", None),
    "all cut": ([{"instruction": "word " * 300, "output": "x"}] * 3, (), "data.max_length", None),
}


@pytest.mark.parametrize(("rows", "words", "key", "num_rows"), REFUSED.values(), ids=REFUSED.keys())
def test_data_that_is_refused_is_shown_first(planned, capsys, rows, words, key, num_rows):
    message = refusal(planned, rows, "--json", *words, max_length=128)
    plan = json.loads(capsys.readouterr().out)
    errors = [each for each in plan["findings"] if each["kind"] == "error"]
    assert errors[0]["key"] == key and errors[0]["message"] in message
    if num_rows is None:
        assert plan["data"] is None and "data: it cannot be used as it is" in plan["unknown"]
        return
    assert plan["num_train_rows"] == num_rows
    cut = {each["max_length"]: each["num_truncated_rows"] for each in plan["data"]["limits"]}
    assert cut[128] > 0 and cut[256] == 0
    if key == "data.max_bad_fraction":
        assert errors[1]["where"].endswith("rows.jsonl:10")
    refusal(planned, rows, *words, max_length=128)
    assert "response tokens lost" in capsys.readouterr().out


def test_rows_for_a_hub_model_that_are_refused_are_told_of_in_the_plan(planned, capsys):
    words = ("--json", "model.name_or_path=Qwen/Qwen2.5-7B")
    assert "rows can't be used" in refusal(planned, [{"instruction": "x", "output": 3}] * 3, *words)
    plan = json.loads(capsys.readouterr().out)
    assert (plan["findings"][0]["key"], plan["num_train_rows"]) == ("data.max_bad_fraction", None)


def test_a_plan_that_cannot_be_written_ends_in_one_line(tmp_path):
    for form in ((), ("--json",)):
        words = (str(ROOT / "recipes" / "qwen7b_qlora.yaml"), "--plan", "--rows", "10", "--num-processes", "1", *form)
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, str(ROOT / "finetune.py"), *words]
            result = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 1
        assert result.stderr == "failed: the plan cannot be written to standard output: No space left on device\n"


def other_base(base, folder, kind, **sizes) -> Path:
    """Save a tiny model of another architecture with the tokenizer of `base`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = shutil.copytree(base, folder)
    architecture = AutoConfig.for_model(kind, vocab_size=420, hidden_size=32, **sizes)
    AutoModelForCausalLM.from_config(architecture).save_pretrained(model)
    return model


def test_rows_beyond_the_positions_are_refused(planned, base, tmp_path):
    model = other_base(base, tmp_path / "model", "gpt2", n_layer=1, n_head=4, n_positions=64)
    message = refusal(planned, LONG, model=model, targets="[c_attn]")
    assert "has 64 positions" in message and "Set data.max_length: 64" in message
    assert planned(LONG, "data.max_length=64", model=model, targets="[c_attn]")


def test_packing_a_model_that_mixes_rows_is_refused(planned, base, tmp_path):
    model = other_base(base, tmp_path / "model", "bloom", n_layer=1, n_head=4)
    assert "would let joined rows see each other" in refusal(planned, LONG, "data.packing=true", model=model)
    assert planned(LONG, model=model)
    assert "unknown: packing" not in planned(LONG, "data.packing=true")


def test_a_large_model_is_not_drawn_to_look_at_packing(planned, monkeypatch):
    from tunebook.plan import model_findings

    monkeypatch.setattr(model_findings, "MOST_DRAWN", 100)
    plan = as_json(planned(LONG, "--json", "data.packing=true"))
    assert any(line.startswith("packing: ") for line in plan["unknown"])


def test_an_adapter_that_peft_cannot_put_on_is_refused(planned, base, tmp_path):
    model = other_base(base, tmp_path / "model", "mamba", num_hidden_layers=1, state_size=4)
    assert "cannot take this adapter" in refusal(planned, LONG, model=model)


def test_training_refuses_what_the_plan_does(tmp_path):
    import datasets

    from tiny_training import TinyData, build_base
    from training_scenarios import run_of
    from tunebook.launching.process_group import start_process_group, stop_process_group
    from tunebook.launching.world import World

    build_base(tmp_path / "base")
    rows = [{"input_ids": [40, 41], "labels": [-100, 41], "length": 2}] * 4
    start_process_group(World())
    try:
        with pytest.raises(Refused, match=r"no row trains <\|end\|>"):
            run_of(tmp_path, World(), "cut", TinyData(datasets.Dataset.from_list(rows), None, ()))
        whole = [*rows, {"input_ids": [40, 257], "labels": [-100, 257], "length": 2}]
        assert run_of(tmp_path, World(), "whole", TinyData(datasets.Dataset.from_list(whole), None, ())).model
    finally:
        stop_process_group()


# What is not here, and how long it takes


def test_a_hub_model_with_local_rows_counts_them_and_says_what_is_unknown(planned):
    plan = as_json(planned([row(number) for number in range(16)], "--json", "model.name_or_path=Qwen/Qwen2.5-7B"))
    assert plan["num_train_rows"] == 16 and plan["data"] is None
    assert any(line.startswith("tokenizer: ") for line in plan["unknown"])
    assert plan["memory"]["checkpointed"]["total"] > 1e9


def test_targets_of_a_hub_model_are_told_from_its_shape(planned):
    words = ("model.name_or_path=Qwen/Qwen2.5-7B", "--rows", "10")
    message = refusal(planned, [row(1)] * 9, *words, targets="[q_proj, vproj]")
    assert "vproj matches no module" in message and "gate_proj" in message


def test_what_the_caches_of_the_hub_hold_is_used(tmp_path, base):
    import datasets

    home = tmp_path / "home"
    snapshot = home / "hub" / "models--org--Tiny" / "snapshots" / "abc"
    shutil.copytree(base, snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    columns = {"instruction": [f"Say {number}." for number in range(9)], "output": ["yes"] * 9}
    info = datasets.DatasetInfo(
        builder_name="json", dataset_name="some_rows", config_name="default", version="0.0.0",
        features=datasets.Features(dict.fromkeys(columns, datasets.Value("string"))),
        splits={"train": {"name": "train", "num_bytes": 1, "num_examples": 9, "dataset_name": "some_rows"}},
    )  # fmt: skip
    folder = home / "datasets" / "org___some_rows" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(
        path=str(folder / "some_rows-train.arrow"), features=info.features
    ) as writer:
        writer.write_batch(columns)
        writer.finalize()
    info.write_to_directory(str(folder))
    fields = {"base": "org/Tiny", "data": "org/SomeRows", "targets": "[qproj]", "max_length": 99, "validation": 0}
    (tmp_path / "case.yaml").write_text(RECIPE.format(**fields))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_HOME": str(home), "TUNEBOOK_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "finetune.py"), "case.yaml", "--plan", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "qproj matches no module" in result.stderr, result.stderr
    plan = json.loads(result.stdout)
    assert (plan["num_train_rows"], plan["data"]["rows_by_source"]) == (9, [["org/SomeRows", 9]])


@pytest.mark.long
def test_52002_cached_rows_are_not_prepared_again_and_take_no_group_and_no_weights(tmp_path, base):
    rows = json.loads(shared("data", "alpaca_2000.json").read_text(encoding="utf-8"))
    write_jsonl(tmp_path / "rows.jsonl", (rows[number % len(rows)] for number in range(52002)))
    model = shutil.copytree(base, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights are read")
    fields = {"base": model, "data": "rows.jsonl", "targets": "all-linear", "max_length": 1024, "validation": 0}
    (tmp_path / "case.yaml").write_text(RECIPE.format(**fields))
    watch = "import sys, finetune; from tunebook.launching.command_line import read_command\n"
    watch += "finetune.finetune(read_command(sys.argv[1:])); import torch\n"
    watch += "assert not torch.distributed.is_initialized()"
    environ = {**os.environ, "TUNEBOOK_CACHE": str(tmp_path / "cache"), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    words = ("case.yaml", "--plan", "--json", "--step-seconds", "0.8", "--gpu", "24")
    seconds, kept = [], []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", watch, *words]
        result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        kept.append({file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.arrow")})
    plan = json.loads(result.stdout)
    assert plan["data"]["num_equal_rows"] > 50000
    assert kept[0] == kept[1] and kept[0], "the second finds the rows prepared"
    # Seconds of the processor, which on a machine with other work are up to twice those of an idle one.
    print(f"seconds of the first plan {seconds[0]:.1f}, of the second {seconds[1]:.1f}")
