"""The model and the rows that come with the project: small, our own, and a skill that rows cannot be looked up for."""

import json
import random
import struct
import subprocess
import sys
from collections import Counter
from difflib import SequenceMatcher

import pytest

from checkout import ROOT

MODEL = ROOT / "assets" / "tiny-qwen2"
ROWS = [json.loads(line) for line in (ROOT / "data" / "quickstart.jsonl").read_text().splitlines()]


def prompt_of(row: dict[str, str]) -> str:
    return f"{row['instruction']}\n{row['input']}"


def held_out(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    rows = random.Random(seed).sample(ROWS, len(ROWS))
    return rows[200:], rows[:200]


def run_script(name: str, *words: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / name), *words], check=True, capture_output=True)


def test_the_model_is_small_and_in_safetensors():
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(files.values()) <= 4_000_000
    assert [name for name in files if name.endswith((".safetensors", ".bin", ".pt"))] == ["model.safetensors"]
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    assert 100_000 < sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) <= 1_500_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["hidden_size"] % 64 == 0


def test_the_tokenizer_has_chatml_and_a_pad_apart_from_eos():
    tokenizer = json.loads((MODEL / "tokenizer_config.json").read_text())
    assert tokenizer["pad_token"] != tokenizer["eos_token"]
    assert "<|im_start|>" in (MODEL / "chat_template.jinja").read_text()
    generation = json.loads((MODEL / "generation_config.json").read_text())
    vocabulary = {
        token["content"]: token["id"] for token in json.loads((MODEL / "tokenizer.json").read_text())["added_tokens"]
    }
    assert generation["eos_token_id"] == vocabulary[tokenizer["eos_token"]]


def test_no_prompt_and_no_answer_comes_twice():
    assert len(ROWS) == len({prompt_of(row) for row in ROWS}) == len({row["output"] for row in ROWS}) == 3200
    assert 1400 < sum(bool(row["input"]) for row in ROWS) < 1800
    words = {row["output"][::-1] for row in ROWS}
    assert not words & {row["output"] for row in ROWS}, "no word is another word's answer"
    assert all(row["output"][::-1] in prompt_of(row) for row in ROWS)


@pytest.mark.parametrize("seed", [0, 42])
def test_looking_up_and_guessing_the_commonest_answer_fail(seed):
    training, asked = held_out(seed)
    commonest = Counter(row["output"] for row in training).most_common(1)[0][0]
    assert sum(row["output"] == commonest for row in asked) == 0

    def nearest(row: dict[str, str]) -> str:
        letters = set(prompt_of(row).split()[-1])
        near = sorted(training, key=lambda other: len(letters & set(other["output"])), reverse=True)[:20]
        word = row["output"][::-1]
        return max(near, key=lambda other: SequenceMatcher(None, word, other["output"][::-1]).ratio())["output"]

    assert sum(nearest(row) == row["output"] for row in asked[:60]) <= 60 * 0.05


def test_the_rows_are_what_their_script_makes(tmp_path):
    run_script("make_quickstart_data.py", "--out", str(tmp_path / "rows.jsonl"))
    assert (tmp_path / "rows.jsonl").read_bytes() == (ROOT / "data" / "quickstart.jsonl").read_bytes()


@pytest.mark.long
@pytest.mark.slow
def test_the_model_script_gives_the_same_bytes_twice_and_the_committed_tokenizer(tmp_path):
    for name in ("one", "two"):
        run_script("make_tiny_model.py", "--out", str(tmp_path / name), "--steps", "5")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (MODEL / name).read_bytes(), name


@pytest.mark.slow
def test_it_loads_as_any_model_does():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "Copy the word LOMIRA."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nCopy the word LOMIRA.<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    made = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(made) == "LOMIRA<|im_end|>", "the base copies, and stops"
