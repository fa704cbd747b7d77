"""How near answers are to the right ones: the same word for word, and ROUGE-L."""

import re
import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec

from tunebook.errors import Problem, Refused

# Scripts that write no blanks between words: each of their signs counts as one.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han
    "\U00020000-\U0003ffff"
)
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]").match


def check_scorer() -> None:
    """Raise Refused where rouge-score is not installed."""
    if find_spec("rouge_score") is None:
        fix = "Type pip install 'rouge-score>=0.1.2,<0.2', or leave answers out with --answer-rows 0"
        raise Refused(Problem("ROUGE-L is counted by rouge-score, which is not installed", fix, "tunebook eval"))


class Words:
    """Cuts a text into lower-case words, in every script: rouge-score's own way knows none but a-z and 0-9.

    For texts of those it gives the same words.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in order."""
        pieces = ((f" {sign} " if _IS_UNSPACED(sign) else sign if _is_of_word(sign) else " ") for sign in text.lower())
        return "".join(pieces).split()


def _is_of_word(sign: str) -> bool:
    """Whether a character is a letter, a mark (a vowel of Hindi, an accent) or a digit."""
    return unicodedata.category(sign)[0] in "LMN"


def mean_rouge_l(right: Sequence[str], answers: Sequence[str]) -> float:
    """Return the mean over all pairs of ROUGE-L, the F-measure of their longest common subsequence (0 to 1; Lin 2004).

    Two texts without any word are alike if they are equal.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer, words = RougeScorer(["rougeL"], tokenizer=Words()), Words()
    total = 0.0
    for expected, answer in zip(right, answers, strict=True):
        if words.tokenize(expected) or words.tokenize(answer):
            total += scorer.score(expected, answer)["rougeL"].fmeasure
        else:
            total += expected.strip() == answer.strip()
    return total / len(right)
