"""The data of a run: rows read, checked, prompted, tokenised and split, made once per machine and memory-mapped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from tunebook.data.cache import cache_root, digest_of, load_or_make
from tunebook.data.chat_prompts import build_prompts
from tunebook.data.making import SlowProgress
from tunebook.data.overflow import Truncation, check_truncated_fraction, truncation_notes
from tunebook.data.prompts import Prompts
from tunebook.data.quarantine import BadRow, check_bad_fraction, read_quarantine
from tunebook.data.sources import Source, open_source
from tunebook.data.split import EVALUATION_FILE, TRAIN_FILE
from tunebook.data.tokenise import QUARANTINE_FILE, Preparation, Progress
from tunebook.data.unused_tokens import unused_token_notes
from tunebook.recipe.schema import Recipe

# Part of the cache key: raise it whenever the same rows would give other tokens, labels or files.
_VERSION = 6
_BAD_ROWS_IN_MEMORY = 1000


@dataclass(frozen=True)
class HeldOutExample:
    """A held-out row to answer before and after training.

    `prompt` is what the user says, without template; `prompt_ids` is the templated prompt as generation sees it.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class PreparedData:
    """Labelled tokens of both splits, and what became of every row.

    `train` and `evaluation` are memory-mapped `datasets.Dataset`s with the columns input_ids and labels (lists of
    int32; -100 where a label doesn't count), length (tokens) and prompt_length (tokens before the last response; 0
    where none is to be asked for); `evaluation` is None without validation rows.
    Train, eval, dropped and bad rows together are `num_rows`, where no row is drawn, repeated, a duplicate or split.
    `num_truncated_rows` were kept with a cut response, `num_dropped_rows` had no response token left or, under
    `data.on_overflow: drop`, were longer than allowed; `response_tokens_lost` counts both, `longest_row` is in tokens
    before the cut, and `truncation_table` says what other limits would do. `trained_tokens` are the labels that count
    in one pass over `train`. `data_fingerprint` is the sha256 of the source's content,
    and of the day where the template writes it. `quarantined` holds the first
    bad rows, `write_quarantine` writes them all. `template` and `notes` are for the user to read, and so are `forms`,
    the forms of the rows that were found. `rows_by_part` counts the rows of each of `source_names`.

    Besides: `num_duplicate_rows` were like an earlier row, `num_unused_rows` were left out by the sources' weights,
    `num_repeated_rows` were added by them, `num_split_rows` where a conversation had to become several rows. Copies
    and parts count one by one wherever rows are cut, dropped, trained or held out.
    """

    train: Any
    evaluation: Any
    examples: tuple[HeldOutExample, ...]
    num_rows: int
    num_bad_rows: int
    num_train_rows: int
    num_eval_rows: int
    num_truncated_rows: int
    num_dropped_rows: int
    response_tokens_lost: int
    longest_row: int
    trained_tokens: int
    data_fingerprint: str
    stop_token_id: int
    template: str
    quarantined: tuple[BadRow, ...]
    notes: tuple[str, ...]
    folder: Path
    source_names: tuple[str, ...]
    rows_by_part: tuple[int, ...]
    truncation_table: tuple[Truncation, ...]
    forms: tuple[str, ...] = ()
    num_duplicate_rows: int = 0
    num_unused_rows: int = 0
    num_repeated_rows: int = 0
    num_split_rows: int = 0


def prepare_data(recipe: Recipe, tokenizer: Any, report_progress: Progress | None = None) -> PreparedData:
    """Return the recipe's data as labelled tokens, from the cache or made now.

    Call it in every process, before a process group exists: one process per machine makes the data while the others
    wait on a lock. `tokenizer` is a fast one from `load_tokenizer`. `report_progress` gets rows done and rows in all,
    in the process that works; by default it prints them from time to time. Raises `Refused` for unusable paths,
    columns, rows, templates and settings, and where the disk has no room.
    """
    data = recipe.data
    source = open_source(data)
    prompts = build_prompts(tokenizer, data.template)
    fingerprint = source.content_digest()
    day = today().isoformat() if "strftime_now" in prompts.source else ""
    folder = cache_root() / "tokens" / _cache_key(recipe, tokenizer, prompts, [fingerprint, day])
    report = report_progress or SlowProgress()
    manifest = load_or_make(folder, Preparation(recipe, source, fingerprint, prompts, tokenizer, report).make)
    counts = manifest["counts"]
    # Again for data that is in the cache already, where a recipe with another limit may have put it.
    bad_rows = read_quarantine(folder / QUARANTINE_FILE, source.names)
    check_bad_fraction(counts["num_rows"], counts["num_bad_rows"], bad_rows, data.max_bad_fraction)
    # On another day such a template makes other rows, and a run that began before can't go on with them.
    prepared = _load_prepared(
        folder, manifest, source, digest_of({"content": fingerprint, "day": day}) if day else fingerprint
    )
    num_labelled = prepared.num_train_rows + prepared.num_eval_rows + prepared.num_dropped_rows
    check_truncated_fraction(prepared.truncation_table, num_labelled, data)
    notes = truncation_notes(prepared.truncation_table, num_labelled, data.max_length)
    unused = unused_token_notes(prepared.train, tokenizer, recipe.model.add_special_tokens or ())
    return replace(prepared, notes=(*prepared.notes, *_notes(manifest, day), *notes, *unused))


def today() -> date:
    """Return the date that a template's `strftime_now` writes."""
    return date.today()


def write_quarantine(prepared: PreparedData, path: Path) -> None:
    """Write every bad row to `path`, one JSON object per line with file, line (or row), field and reason."""
    with path.open("w", encoding="utf-8") as file:
        for row in read_quarantine(prepared.folder / QUARANTINE_FILE, prepared.source_names):
            entry = {"file": row.file, row.unit: row.number, "field": row.field, "reason": row.reason}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _cache_key(recipe: Recipe, tokenizer: Any, prompts: Prompts, content: list[str]) -> str:
    """Return the sha256 of everything that the prepared files depend on."""
    import tokenizers
    import transformers

    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    data = recipe.data
    return digest_of(
        {
            "version": _VERSION,
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,  # renders the chat template
            "content": content,
            "tokenizer": backend.to_str(),
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "template": [prompts.name, prompts.source],
            "leading_ids": prompts.leading_ids,
            "stop_token_id": prompts.stop_token_id,
            "format": [data.format, data.columns],
            "train_on": data.train_on,
            "deduplicate": data.deduplicate,
            "max_length": data.max_length,
            "on_overflow": data.on_overflow,
            "validation": data.validation,
            "seed": recipe.data_seed,
            "answer_rows": data.answer_rows,
        }
    )


def _notes(manifest: Mapping[str, Any], day: str) -> list[str]:
    """Return what the user should know of the prepared rows."""
    notes = []
    if count := manifest["num_open_rows"]:
        rows = "1 conversation goes" if count == 1 else f"{count:,} conversations go"
        notes.append(f"{rows} on after the last answer that is trained; the turns after it are left out")
    if day:
        notes.append(
            f"the template writes today's date ({day}): on another day the rows are made anew and an unfinished run "
            "can't go on; a .jinja file with a fixed date (data.template) keeps them"
        )
    return notes


def _load_prepared(folder: Path, manifest: Mapping[str, Any], source: Source, fingerprint: str) -> PreparedData:
    from datasets import Dataset

    counts = manifest["counts"]
    has_evaluation = counts["num_eval_rows"] > 0
    examples = manifest["examples"]
    return PreparedData(
        train=Dataset.from_file(str(folder / TRAIN_FILE)),
        evaluation=Dataset.from_file(str(folder / EVALUATION_FILE)) if has_evaluation else None,
        examples=tuple(HeldOutExample(row["prompt"], tuple(row["prompt_ids"]), row["answer"]) for row in examples),
        **counts,
        data_fingerprint=fingerprint,
        stop_token_id=manifest["stop_token_id"],
        template=manifest["template"],
        forms=tuple(manifest["forms"]),
        quarantined=tuple(islice(read_quarantine(folder / QUARANTINE_FILE, source.names), _BAD_ROWS_IN_MEMORY)),
        notes=source.notes,
        folder=folder,
        source_names=source.names,
        rows_by_part=tuple(manifest["rows_by_part"]),
        truncation_table=tuple(Truncation(**row) for row in manifest["truncation_table"]),
    )
