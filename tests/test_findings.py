"""Whether a model can learn to stop: the token that ends a turn is trained, and stands for nothing else."""

from types import SimpleNamespace

import datasets
import pytest

from tiny_training import build_recipe
from tunebook.plan.findings import find_stop_problems

pytestmark = pytest.mark.slow
STOP = 1


def prepared(*labels):
    """Rows with these labels."""
    features = datasets.Features({"labels": datasets.List(datasets.Value("int32"))})
    train = datasets.Dataset.from_list([{"labels": row} for row in labels], features=features)
    return SimpleNamespace(train=train, stop_token_id=STOP)


def build_tokenizer(byte_level):
    """Return a tokenizer of which token 1, `<end>`, is end and unknown token at once, as GPT-2's is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if byte_level:
        letters = {letter: number + 2 for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Tokenizer(models.BPE({"a": 0, "<end>": STOP, **letters}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend = Tokenizer(models.WordLevel({"word": 0, "<end>": STOP}, unk_token="<end>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<end>")


def test_an_end_token_that_unknown_text_is_never_turned_into_is_fine():
    tokenizer = build_tokenizer(byte_level=True)
    assert tokenizer.unk_token_id == STOP
    assert find_stop_problems(build_recipe("org/tiny"), tokenizer, prepared([-100, 5, STOP])) == []


def test_an_end_token_that_unknown_text_becomes_is_refused():
    [problem] = find_stop_problems(build_recipe("org/tiny"), build_tokenizer(byte_level=False), prepared([0, STOP]))
    assert "<end>, which stands for unknown text as well" in problem.message


def test_rows_that_never_train_the_end_token_are_refused():
    [problem] = find_stop_problems(build_recipe("org/tiny"), build_tokenizer(byte_level=True), prepared([-100, 5], [7]))
    assert "no row trains <end>" in problem.message and problem.key == "data.max_length"


def test_an_end_token_that_the_tokenizer_lacks_is_refused():
    data = prepared([5, STOP])
    data.stop_token_id = 10_000
    [problem] = find_stop_problems(build_recipe("org/tiny"), build_tokenizer(byte_level=True), data)
    assert "unknown to the tokenizer (id 10000)" in problem.message
