"""What is wrong or worth knowing about a run before it starts; errors refuse it, warnings don't.

What a wrong recipe or an unfit device is refused for is found earlier (recipe, plan); this is about data, tokenizer
and model together. `--plan` shows it, and the start of training checks the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tunebook.errors import Problem
from tunebook.model.shapes import ModelShape
from tunebook.recipe.schema import DataSection, Recipe
from tunebook.system.places import is_local, local_path

# Modules of a known architecture beside the linear layers of its blocks, as far as LoRA can name them.
OTHER_MODULES = {"lm_head", "embed_tokens"}
# A private character that no vocabulary holds: byte-level tokenizers spell it, others write their unknown token.
NO_TEXT = "\U0010fffd"
MANY_EQUAL, MUCH_PADDING = 0.01, 0.2


@dataclass(frozen=True)
class Finding:
    """One thing found: an error refuses the run, a warning asks for a decision, a note for nothing.

    `key` is the recipe key it is about and `where` a place outside the recipe, if there is one.
    """

    kind: Literal["error", "warning", "note"]
    message: str
    fix: str
    key: str = ""
    where: str = ""

    def as_problem(self) -> Problem:
        """Return the finding as a problem that can be refused for."""
        return Problem(self.message, self.fix, self.where, self.key)

    def render(self) -> str:
        """Return the finding on one line."""
        return f"{self.kind}: {self.as_problem().render()}"


class Prepared(Protocol):
    """What is asked of prepared data."""

    @property
    def train(self) -> Any:
        """The training rows, a `datasets.Dataset`."""

    @property
    def stop_token_id(self) -> int:
        """The id of the token that ends a turn."""


def find_stop_problems(recipe: Recipe, tokenizer: Any, data: Prepared) -> list[Problem]:
    """Return why the model could not learn to stop, or could not stop though it learnt it; empty where all is well.

    Reads the rows only until the first one that trains the stop token.
    """
    stop, name = data.stop_token_id, recipe.model.name_or_path
    token = tokenizer.convert_ids_to_tokens(stop)
    is_unknown = token is not None and stop in tokenizer.encode(NO_TEXT, add_special_tokens=False)
    if token is None or is_unknown:
        what = f"{token}, which stands for unknown text as well" if is_unknown else "unknown to the tokenizer"
        fix = "Name a token of the vocabulary as eos_token in tokenizer_config.json, or mend the chat template"
        return [Problem(f"the token that ends a turn is {what} (id {stop})", fix, key="model.name_or_path")]
    problems = []
    if not trains_token(data.train, stop):
        message = f"no row trains {token}, the token that ends a turn: every one is cut before it"
        problems.append(Problem(message, "Raise it, so that answers end inside it", key="data.max_length"))
    for setting in _settings_that_forbid(stop, load_generation_settings(name)):
        message = f"generation_config.json of {name} keeps {token}, the token that ends a turn, from being generated: "
        fix = f"Remove {stop} from it"
        problems.append(Problem(message + setting, fix, key="model.name_or_path"))
    return problems


def trains_token(train: Any, token_id: int) -> bool:
    """Whether any row has the token among its labels."""
    import pyarrow.compute as pc

    return any(
        pc.any(pc.equal(column.flatten(), token_id)).as_py()
        for column in train.data.column("labels").chunks
        if len(column)
    )


def load_generation_settings(name_or_path: str) -> Mapping[str, Any]:
    """Return generation_config.json of a local model or of one in the Hub's cache; empty where there is none."""
    if is_local(name_or_path):
        place: Path | str | None = local_path(name_or_path) / "generation_config.json"
    else:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "generation_config.json")
        place = cached if isinstance(cached, str) else None
    try:
        settings = json.loads(Path(place).read_text(encoding="utf-8")) if place else {}
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _settings_that_forbid(stop: int, settings: Mapping[str, Any]) -> list[str]:
    """Return the generation settings under which the token `stop` can never come out."""
    forbidding = [name for name in ("suppress_tokens",) if stop in _listed(settings.get(name))]
    words = settings.get("bad_words_ids")
    if any(word == [stop] for word in (words if isinstance(words, list) else [])):
        forbidding.append("bad_words_ids")
    return forbidding


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def find_stop_notes(recipe: Recipe, tokenizer: Any, stop_token_id: int) -> list[Finding]:
    """Return a note where the base's own settings would not stop at the token that is trained."""
    given = load_generation_settings(recipe.model.name_or_path).get("eos_token_id", tokenizer.eos_token_id)
    if given is None or stop_token_id in _listed(given):
        return []
    token = tokenizer.convert_ids_to_tokens(stop_token_id)
    others = ", ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in _listed(given))
    message = f"turns end with {token}, and the base stops at {others}: what is saved stops at both"
    return [Finding("note", message, "Programs that read no generation_config.json must be told")]


def find_shape_problems(
    recipe: Recipe, shape: ModelShape, tokenizer: Any | None, longest_row: int = 0
) -> list[Problem]:
    """Return what the shape alone tells of a model that is not on this machine: LoRA targets, vocabulary, positions.

    `tokenizer` and `longest_row` (in tokens) are None and 0 where they are not known.
    """
    problems = []
    targets = (recipe.lora or {}).get("target_modules")
    linears = [name for name, _, _ in shape.linears]
    known = {*linears, *OTHER_MODULES, "q_norm", "k_norm"}
    for target in targets if isinstance(targets, list) else []:
        if target.rpartition(".")[2] not in known:
            message = f"{target} matches no module of this model"
            problems.append(Problem(message, f"Its linear layers: {', '.join(linears)}", key="lora.target_modules"))
    added = set(recipe.model.add_special_tokens or ())
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    largest = max((number for token, number in vocabulary.items() if token not in added), default=-1)
    if largest >= shape.vocab_size:
        name = recipe.model.name_or_path
        message = f"the tokenizer has ids up to {largest}, the embedding of {name} has {shape.vocab_size} rows"
        problems.append(Problem(message, "Give the tokenizer and the weights of one model", key="model.name_or_path"))
    longest, positions = min(longest_row, recipe.data.max_length), shape.max_positions
    if 0 < positions < longest:
        message = f"rows of {longest} tokens, and {recipe.model.name_or_path} has {positions} positions"
        problems.append(Problem(message, f"Set it to {positions}", key="data.max_length"))
    return problems


def find_data_warnings(data: DataSection, num_rows: int, num_equal: int | None, padding_share: float) -> list[Finding]:
    """Return what of the data costs quality or time, by its share of all rows; rows that are cut are noted apart.

    What the recipe's `data` section asks for already is not advised.
    """
    found = []
    if not data.deduplicate and num_equal is not None and num_equal > MANY_EQUAL * num_rows:
        message = f"{num_equal:,} of {num_rows:,} rows ({num_equal / num_rows:.1%}) are equal to an earlier one"
        fix = "Set it to true: they count several times, and held-out rows are not unseen"
        found.append(Finding("warning", message, fix, "data.deduplicate"))
    if not data.packing and padding_share > MUCH_PADDING:
        message = f"{padding_share:.0%} of all positions are padding"
        # With sdpa joined rows were slower on a CPU from 8 rows on: attention costs the square of their length.
        fix = "A smaller one has less; data.packing: true has none, and is meant for flash_attention_2"
        found.append(Finding("warning", message, fix, "training.per_device_train_batch_size"))
    return found


def as_errors(problems: Sequence[Problem]) -> list[Finding]:
    """Return problems as findings that refuse the run."""
    return [Finding("error", problem.message, problem.fix, problem.key, problem.where) for problem in problems]
