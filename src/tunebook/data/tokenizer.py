"""The tokenizer of a model, loaded or refused with a reason."""

from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.model.new_tokens import add_tokens
from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local, local_path

_KEY = "model.name_or_path"
# How a refusal reads that says nothing about the model itself: nobody could look at it.
HUB_SILENT = ("the Hub can't be reached", "couldn't connect", "is gated")
# transformers makes an empty tokenizer, without a word, from a folder that has a config.json and none of these.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(name_or_path: str, revision: str | None = None) -> Any:
    """Return the fast tokenizer (`PreTrainedTokenizerFast`) of a folder or a Hub model, with a pad token.

    A tokenizer without a pad token gets its unk or eos token for it: nothing is added to the vocabulary, and padding is
    told apart by position everywhere. Raises `Refused` where the folder, its tokenizer files or a fast tokenizer are
    missing, or the Hub can't be reached.
    """
    if is_local(name_or_path):
        _check_folder(name_or_path)
        name_or_path, revision = str(local_path(name_or_path)), None
    tokenizer = _load(name_or_path, revision)
    if not tokenizer.is_fast:
        message = f"{name_or_path} has no fast tokenizer (got {type(tokenizer).__name__})"
        raise Refused(Problem(message, "Use a model with a tokenizer.json", key=_KEY))
    if tokenizer.pad_token is None:
        stand_in = tokenizer.unk_token or tokenizer.eos_token
        if stand_in is None:
            message = f"the tokenizer of {name_or_path} has no pad, unk or eos token"
            raise Refused(Problem(message, "Set pad_token in tokenizer_config.json", key=_KEY))
        tokenizer.pad_token = stand_in
    return tokenizer


def tokenizer_of(recipe: Recipe) -> Any:
    """Return the tokenizer of a recipe's model, with the tokens that the recipe adds to it; see `load_tokenizer`."""
    tokenizer = load_tokenizer(recipe.model.name_or_path, recipe.model.revision)
    if recipe.model.add_special_tokens:
        add_tokens(tokenizer, recipe.model.add_special_tokens)
    return tokenizer


def _check_folder(name_or_path: str) -> None:
    folder = local_path(name_or_path)
    if not folder.is_dir():
        raise Refused(Problem(f"folder {name_or_path} does not exist", "Correct the path", key=_KEY))
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES) and not list(folder.glob("*.tiktoken")):
        message = f"no tokenizer files in {name_or_path}"
        raise Refused(Problem(message, "Copy the tokenizer's files (tokenizer.json) beside config.json", key=_KEY))


def _load(name_or_path: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    # Without an explicit False, transformers asks on the terminal whether to run code from the model's repository.
    options = {"trust_remote_code": False} | ({"revision": revision} if revision else {})
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **options)
    except Exception as error:  # from broken JSON to a failed download: the libraries below raise many kinds
        raise Refused(_load_problem(name_or_path, revision, error)) from error


def _load_problem(name_or_path: str, revision: str | None, error: Exception) -> Problem:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "couldn't connect" in reason.lower() or "offline" in reason.lower():
        at = f" at revision {revision}" if revision else ""
        message = f"the Hub can't be reached, and the tokenizer of {name_or_path}{at} is not in the cache"
        return Problem(message, "Go online once, or name a local folder", key=_KEY)
    if "gated" in reason.lower():
        return Problem(f"{name_or_path} is gated", "Ask for access on its page, then `hf auth login`", key=_KEY)
    if "is not a local folder" in reason:
        message = f"no folder {name_or_path} here, and no model of that name on the Hub that you can read"
        return Problem(message, "Correct the name; a private model needs `hf auth login`", key=_KEY)
    return Problem(f"the tokenizer of {name_or_path} can't be loaded: {reason}", "Mend its files", key=_KEY)
