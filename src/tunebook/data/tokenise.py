"""One preparation: all rows of a source turned into the files of a cache folder."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunebook.batch_arithmetic import count_held_out
from tunebook.data.ahead import one_ahead
from tunebook.data.formats import AlpacaRow
from tunebook.data.labels import label_schema, label_turns
from tunebook.data.making import check_room
from tunebook.data.overflow import Overflow, longer_rows_problems, table_as_json
from tunebook.data.prompts import Prompts
from tunebook.data.rows import Scan, Source, find_places, read_good_rows, scan_usable
from tunebook.data.split import HeldOut, Splits, write_splits
from tunebook.data.tokens import TurnEncoder
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import Recipe

QUARANTINE_FILE = "quarantine.jsonl"
_LABELLED_FILE = "labelled.arrow"
# A batch is small against the machine's memory even if its rows are long (an encoding takes about 150 bytes a token).
_BATCH_ROWS = 1000
_BATCH_CHARS = 1_000_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Counts:
    """Rows and tokens of a preparation. Train, eval, dropped and bad rows together are all rows of the source."""

    num_rows: int
    num_bad_rows: int
    num_train_rows: int
    num_eval_rows: int
    num_truncated_rows: int
    num_dropped_rows: int
    response_tokens_lost: int
    trained_tokens: int
    longest_row: int


@dataclass(frozen=True)
class Preparation:
    """What is needed to fill a cache folder. `content_digest` is that of the source when the cache was looked up."""

    recipe: Recipe
    source: Source
    content_digest: str
    prompts: Prompts
    tokenizer: Any
    report_progress: Progress | None = None

    def make(self, folder: Path) -> Mapping[str, Any]:
        """Write train, eval and quarantine files to `folder`; return the counts and the held-out examples as JSON.

        Rows are checked before anything is tokenised, so a refusal comes early. Raises `Refused`.
        """
        scan = scan_usable(self.source, folder / QUARANTINE_FILE, self.recipe.data.max_bad_fraction)
        overflow = Overflow(self.recipe.data.max_length, self.recipe.data.on_overflow)
        num_labelled = self._write_labelled(folder / _LABELLED_FILE, scan, overflow)
        self._check_longer_rows(overflow, scan)
        held_out = self._held_out(scan, num_labelled, overflow)
        splits = write_splits(folder / _LABELLED_FILE, folder, held_out)
        (folder / _LABELLED_FILE).unlink()
        examples = self._examples(splits)
        if self.source.content_digest() != self.content_digest:
            message = "the data changed while it was being read"
            raise Refused(Problem(message, "Start again when nothing writes to it", key="data.path"))
        counts = Counts(
            num_rows=scan.num_rows,
            num_bad_rows=scan.num_bad_rows,
            num_train_rows=splits.num_train_rows,
            num_eval_rows=splits.num_eval_rows,
            trained_tokens=splits.trained_tokens,
            longest_row=overflow.longest_row,
            num_truncated_rows=overflow.at_limit().num_truncated_rows,
            num_dropped_rows=overflow.at_limit().num_dropped_rows,
            response_tokens_lost=overflow.at_limit().response_tokens_lost,
        )
        truncation_table = table_as_json(overflow.table())
        return {"counts": asdict(counts), "examples": examples, "truncation_table": truncation_table}

    def _write_labelled(self, path: Path, scan: Scan, overflow: Overflow) -> int:
        """Tokenise all usable rows into one Arrow stream and return how many kept a label that counts."""
        import pyarrow as pa

        encoder = TurnEncoder(self.tokenizer, self.prompts)
        num_good_rows = scan.num_rows - scan.num_bad_rows
        num_done = num_labelled = 0
        turns = map(self.prompts.render, _batches(read_good_rows(self.source)))
        with (
            path.open("wb") as file,
            pa.ipc.new_stream(file, label_schema()) as stream,
            _garbage_search_paused() as collect_young,
        ):
            # The Rust tokenizer works on all cores and leaves Python free to read and label other rows.
            for encoded in one_ahead(encoder.encode, turns):
                labelled = label_turns(encoded, num_done, overflow)
                stream.write_batch(labelled)
                num_done += len(encoded)
                num_labelled += labelled.num_rows
                check_room(path.parent, file.tell(), num_done / num_good_rows)
                if self.report_progress:
                    self.report_progress(num_done, num_good_rows)
                collect_young()
        return num_labelled

    def _check_longer_rows(self, overflow: Overflow, scan: Scan) -> None:
        """Refuse rows that are longer than the limit where the recipe says so, naming the first of them."""
        if self.recipe.data.on_overflow == "error" and overflow.num_longer_rows:
            places = find_places(self.source, [ordinal for ordinal, _ in overflow.first_longer_rows])
            raise Refused(longer_rows_problems(overflow, scan.num_rows - scan.num_bad_rows, places))

    def _held_out(self, scan: Scan, num_labelled: int, overflow: Overflow) -> HeldOut:
        """Return how to split the labelled rows; refuse where there are none, or too few to split."""
        data = self.recipe.data
        if num_labelled == 0:
            num_good_rows = scan.num_rows - scan.num_bad_rows
            fate = "is longer than" if data.on_overflow == "drop" else "loses its whole response at"
            message = (
                f"no row has anything left to train on: each of the {num_good_rows} usable rows {fate} "
                f"max_length {data.max_length} (the longest row has {overflow.longest_row} tokens)"
            )
            raise Refused(Problem(message, "Raise it, or shorten the prompts", key="data.max_length"))
        if data.validation > 0 and num_labelled == 1:
            message = f"{data.validation:g} of the rows can't be held out: there is only 1 row"
            raise Refused(Problem(message, "Give more rows, or leave it out", key="data.validation"))
        num_held_out = count_held_out(num_labelled, data.validation)
        return HeldOut(num_labelled, num_held_out, self.recipe.data_seed, data.answer_rows)

    def _examples(self, splits: Splits) -> list[dict[str, Any]]:
        """Return prompt, prompt ids and answer of the first held-out rows, with the text read from the source again."""
        prompt_ids = dict(splits.first_held_out)
        examples: list[dict[str, Any]] = []
        for ordinal, row in enumerate(read_good_rows(self.source)):
            if len(examples) == len(prompt_ids):
                break
            if ordinal in prompt_ids:
                examples.append({"prompt": row.question, "prompt_ids": prompt_ids[ordinal], "answer": row.output})
        return examples


@contextmanager
def _garbage_search_paused() -> Iterator[Callable[[], object]]:
    """Pause the search for cycles: it would visit every id several times, a quarter of this thread's time.

    Gives a function that searches what is new, once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield partial(gc.collect, 0)
    finally:
        if was_enabled:
            gc.enable()


def _batches(rows: Iterator[AlpacaRow]) -> Iterator[list[AlpacaRow]]:
    """Yield lists of rows, bounded in rows and in characters; a single row may be longer than the bound."""
    batch: list[AlpacaRow] = []
    num_chars = 0
    for row in rows:
        row_chars = sum(map(len, row))
        if batch and (len(batch) == _BATCH_ROWS or num_chars + row_chars > _BATCH_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(row)
        num_chars += row_chars
    if batch:
        yield batch
