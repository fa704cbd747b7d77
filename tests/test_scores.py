"""ROUGE-L: the library's own figures, and words of every script."""

import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from tunebook.errors import Refused
from tunebook.using.scores import Words, check_scorer, mean_rouge_l


@pytest.mark.parametrize(
    "text", ["The quick-brown fox's 2nd JUMP, at 3.5 m/s!", "snake_case and\ttabs\n", "", "...", "a1b2 x__y 007"]
)
def test_plain_english_is_cut_as_rouge_score_does(text):
    assert Words().tokenize(text) == DefaultTokenizer(use_stemmer=False).tokenize(text)


def test_other_scripts_have_words_too():
    assert Words().tokenize("Où est le CAFÉ?") == ["où", "est", "le", "café"]
    assert Words().tokenize("我爱北京 abc") == ["我", "爱", "北", "京", "abc"]
    assert Words().tokenize("Привет, мир") == ["привет", "мир"]
    assert Words().tokenize("हिन्दी में") == ["हिन्दी", "में"]


def test_the_mean_is_that_of_the_library():
    right = ["the cat sat on the mat", "one two three", "blue"]
    answers = ["the cat on a mat", "three two one", "a red house"]
    scorer = RougeScorer(["rougeL"])
    expected = [scorer.score(*pair)["rougeL"].fmeasure for pair in zip(right, answers, strict=True)]
    assert mean_rouge_l(right, answers) == pytest.approx(sum(expected) / 3, abs=1e-12)
    # By hand: 4 of 6 and of 5 words in order; 1 of 3; none.
    assert mean_rouge_l(right, answers) == pytest.approx((8 / 11 + 1 / 3 + 0) / 3)


def test_texts_without_words_are_alike_if_they_are_equal():
    assert mean_rouge_l(["!!", "?", "我是"], ["!! ", "!", "我是"]) == pytest.approx(2 / 3)


def test_a_missing_scorer_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr("tunebook.using.scores.find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"pip install 'rouge-score"):
        check_scorer()
