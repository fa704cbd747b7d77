"""A model's tokenizer is loaded with a pad token, or refused with a reason."""

import json
import sys

import pytest

from tiny_models import build_tiny_tokenizer
from tunebook.data.tokenizer import load_tokenizer
from tunebook.errors import Refused

pytestmark = pytest.mark.slow


def saved(folder, **options):
    build_tiny_tokenizer(**options).save_pretrained(folder)
    return str(folder)


def refusal(name, revision=None):
    with pytest.raises(Refused) as refused:
        load_tokenizer(name, revision)
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "pad"),
    [
        ({"pad": "own"}, "<|pad|>"),
        ({"pad": "eos"}, "<|endoftext|>"),
        ({"pad": "none"}, "<|endoftext|>"),
        ({"pad": "none", "tokenizer": "metaspace"}, "<unk>"),
    ],
)
def test_every_tokenizer_has_a_pad_token_and_no_new_one(tmp_path, options, pad):
    tokenizer = load_tokenizer(saved(tmp_path, **options))
    assert tokenizer.pad_token == pad
    assert len(tokenizer) == 420
    assert tokenizer.is_fast


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert f"no tokenizer files in {tmp_path}" in refusal(str(tmp_path))


def test_a_missing_folder_is_refused():
    assert "folder ./nowhere does not exist" in refusal("./nowhere")


def test_broken_files_are_refused(tmp_path):
    saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"the tokenizer of {tmp_path} can't be loaded: " in refusal(str(tmp_path))


def test_code_from_the_repository_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    saved(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr(sys, "stdin", None)
    try:
        assert load_tokenizer(str(tmp_path)).is_fast
    except Refused as refused:
        assert "can't be loaded" in str(refused)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("We couldn't connect to 'https://huggingface.co' to load the files", "the Hub can't be reached"),
        ("You are trying to access a gated repo.\nMake sure", "org/tiny is gated"),
        ("org/tiny is not a local folder and is not a valid model identifier", "no folder org/tiny here, and no model"),
        ("", "the tokenizer of org/tiny can't be loaded: OSError"),
    ],
)
def test_what_the_hub_says_is_said_in_one_line(monkeypatch, reason, message):
    from transformers import AutoTokenizer

    def fail(name, **options):
        assert options == {"trust_remote_code": False, "revision": "v1"}
        raise OSError(reason)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    text = refusal("org/tiny", "v1")
    assert message in text
    assert "\n" not in text
