"""One preparation: all rows of a source turned into the files of a cache folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tunebook.data.ahead import one_ahead
from tunebook.data.batches import batches_of
from tunebook.data.conversation import Conversation, Fault, TrainOn
from tunebook.data.garbage import collect_young, garbage_search_paused
from tunebook.data.labels import label_schema, label_turns
from tunebook.data.making import check_room
from tunebook.data.overflow import Overflow, longer_rows_problems, table_as_json
from tunebook.data.prompts import AlpacaPrompts, Prompts, Rendered, Turn, eos_token_id
from tunebook.data.quarantine import check_bad_fraction, first_problems, read_quarantine, write_bad_row
from tunebook.data.record import place_of
from tunebook.data.rows import Scan, UsedRow, read_used_rows, scan_usable
from tunebook.data.sources import Source
from tunebook.data.split import HeldOut, Splits, write_splits
from tunebook.data.tokens import EncodedTurn, TurnEncoder, join_turns, train_conversation
from tunebook.errors import Problem, Refused
from tunebook.plan.arithmetic import count_held_out
from tunebook.recipe.schema import Recipe

QUARANTINE_FILE = "quarantine.jsonl"
_LABELLED_FILE = "labelled.arrow"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Counts:
    """Rows and tokens of a preparation.

    Train, eval, dropped, bad, duplicate and unused rows together are all rows of the source, and besides them the
    repeated ones and those that splitting conversations added.
    """

    num_rows: int
    num_bad_rows: int
    num_train_rows: int
    num_eval_rows: int
    num_truncated_rows: int
    num_dropped_rows: int
    response_tokens_lost: int
    trained_tokens: int
    longest_row: int
    num_duplicate_rows: int
    num_unused_rows: int
    num_repeated_rows: int
    num_split_rows: int


@dataclass
class Written:
    """What became of the usable rows while they were tokenised."""

    num_rows: int = 0  # that kept a label that counts; copies and parts of one row are one
    num_bad_rows: int = 0  # that the template can't show
    num_split_rows: int = 0  # added where a conversation became several rows
    num_repeated_rows: int = 0  # copies, parts of split rows included
    num_open_rows: int = 0  # with turns after the last trained answer, which are left out
    longer_places: list[str] = field(default_factory=list)  # of the first rows that are longer than the limit


class RenderedBatch(NamedTuple):
    """Rows and what the template made of each."""

    rows: list[UsedRow]
    rendered: list[Rendered]


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
        data, quarantine = self.recipe.data, folder / QUARANTINE_FILE
        scan = scan_usable(self.source, quarantine, data)
        self._check_template(scan)
        overflow = Overflow(data.max_length, data.on_overflow)
        with quarantine.open("a", encoding="utf-8") as bad_rows:
            written = self._write_labelled(folder / _LABELLED_FILE, scan, overflow, bad_rows)
        shown = read_quarantine(quarantine, self.source.names)
        check_bad_fraction(scan.num_rows, scan.num_bad_rows + written.num_bad_rows, shown, data.max_bad_fraction)
        if data.on_overflow == "error" and overflow.num_longer_rows:
            num_good_rows = scan.num_used_rows - written.num_bad_rows
            raise Refused(longer_rows_problems(overflow, num_good_rows, written.longer_places))
        self._check_any_shown(scan, written, quarantine)
        held_out = self._held_out(scan, written, overflow)
        splits = write_splits(folder / _LABELLED_FILE, folder, held_out)
        (folder / _LABELLED_FILE).unlink()
        examples = self._examples(splits, scan)
        if self.source.content_digest() != self.content_digest:
            message = "the data changed while it was being read"
            raise Refused(Problem(message, "Start again when nothing writes to it", key="data.path"))
        counts = _counts(scan, written, overflow, splits)
        facts = {
            "examples": examples,
            "rows_by_part": scan.rows_by_part,
            "truncation_table": table_as_json(overflow.table()),
            "num_open_rows": written.num_open_rows,
        }
        return {"counts": asdict(counts), **facts, **self._described(scan.forms)}

    def _described(self, forms: tuple[str, ...]) -> dict[str, Any]:
        """Return what is said of the rows: their forms, their template and the token that ends them."""
        if forms and all(form.startswith("text") for form in forms):
            stop, template = eos_token_id(self.tokenizer), "nothing: plain text"
        else:
            stop, template = self.prompts.stop_token_id, self.prompts.name
        return {"forms": forms, "stop_token_id": stop, "template": template}

    def _check_template(self, scan: Scan) -> None:
        """Refuse conversations for a model without a chat template: the Alpaca text has one question and one answer."""
        forms = [form for form in scan.forms if form.startswith(("messages", "sharegpt"))]
        if forms and isinstance(self.prompts, AlpacaPrompts) and self.recipe.data.template == "auto":
            message = f"the tokenizer has no chat_template, and rows of the form {forms[0]} need one"
            fix = "Set it to chatml, to a .jinja file, or to alpaca where each row is one question and one answer"
            raise Refused(Problem(message, fix, key="data.template"))

    def _write_labelled(self, path: Path, scan: Scan, overflow: Overflow, bad_rows: TextIO) -> Written:
        """Tokenise all usable rows into one Arrow stream and return what became of them."""
        import pyarrow as pa

        encode = partial(_encode, TurnEncoder(self.tokenizer, self.prompts))
        batches = map(self._render, batches_of(self._used_rows(scan)))
        written, num_done = Written(), 0
        with path.open("wb") as file, pa.ipc.new_stream(file, label_schema()) as stream, garbage_search_paused():
            # The Rust tokenizer works on all cores and leaves Python free to read and label other rows.
            for (rows, rendered), encoded in one_ahead(encode, batches):
                ordinals, turns = self._collect(rows, rendered, encoded, written, bad_rows)
                labelled = label_turns(turns, ordinals, overflow)
                stream.write_batch(labelled)
                num_done += len(rows)
                written.num_rows += len(labelled.column("ordinal").unique())
                longer = overflow.first_longer_rows[len(written.longer_places) :]
                written.longer_places += self._places(rows, [ordinal for ordinal, _ in longer])
                check_room(path.parent, file.tell(), num_done / scan.num_used_rows)
                if self.report_progress:
                    self.report_progress(num_done, scan.num_used_rows)
                collect_young()
        return written

    def _render(self, rows: list[UsedRow]) -> RenderedBatch:
        return RenderedBatch(rows, self.prompts.render([used.placed.row for used in rows], self.recipe.data.train_on))

    def _collect(
        self,
        rows: Sequence[UsedRow],
        rendered: Sequence[Rendered],
        encoded: Sequence[EncodedTurn],
        written: Written,
        bad_rows: TextIO,
    ) -> tuple[list[int], list[EncodedTurn]]:
        """Return the ordinals of a batch's rows and their ids, the turns of a conversation joined, copies made."""
        train_on, following = self.recipe.data.train_on, iter(encoded)
        ordinals: list[int] = []
        found: list[EncodedTurn] = []
        for used, turns in zip(rows, rendered, strict=True):
            parts = turns if isinstance(turns, Fault) else _parts([next(following) for _ in turns], turns, train_on)
            if isinstance(parts, Fault):
                placed = used.placed
                write_bad_row(bad_rows, placed.part, placed.number, placed.unit, parts)
                written.num_bad_rows += 1
                continue
            found += parts * used.copies
            ordinals += [used.ordinal] * (len(parts) * used.copies)
            written.num_open_rows += _goes_on(used.placed.row, train_on)
            written.num_split_rows += len(parts) - 1
            written.num_repeated_rows += len(parts) * (used.copies - 1)
        return ordinals, found

    def _places(self, rows: Sequence[UsedRow], ordinals: Sequence[int]) -> list[str]:
        """Return where those of a batch's rows stand that have these ordinals."""
        placed = [used.placed for used in rows if used.ordinal in ordinals]
        return [place_of(self.source.names[row.part], row.number, row.unit) for row in placed]

    def _used_rows(self, scan: Scan) -> Iterator[UsedRow]:
        return read_used_rows(self.source, scan, self.recipe.data_seed, self.recipe.data.deduplicate)

    def _check_any_shown(self, scan: Scan, written: Written, quarantine: Path) -> None:
        """Refuse where the template shows none of the rows, with its reasons for the first."""
        if scan.num_used_rows == written.num_bad_rows:
            message = f"none of the {scan.num_rows} rows can be used: {self.prompts.name} shows none of the usable ones"
            summary = Problem(message, "Mend the rows, or set another template", key="data.template")
            raise Refused([summary, *first_problems(read_quarantine(quarantine, self.source.names))])

    def _held_out(self, scan: Scan, written: Written, overflow: Overflow) -> HeldOut:
        """Return how to split the labelled rows; refuse where there are none, or too few to split."""
        data = self.recipe.data
        num_good_rows = scan.num_used_rows - written.num_bad_rows
        if written.num_rows == 0:
            fate = "is longer than" if data.on_overflow == "drop" else "loses its whole response at"
            message = (
                f"no row has anything left to train on: each of the {num_good_rows} usable rows {fate} "
                f"max_length {data.max_length} (the longest row has {overflow.longest_row} tokens)"
            )
            raise Refused(Problem(message, "Raise it, or shorten the prompts", key="data.max_length"))
        if data.validation > 0 and written.num_rows == 1:
            message = f"{data.validation:g} of the rows can't be held out: there is only 1 row"
            raise Refused(Problem(message, "Give more rows, or leave it out", key="data.validation"))
        num_held_out = count_held_out(written.num_rows, data.validation)
        return HeldOut(written.num_rows, num_held_out, self.recipe.data_seed, data.answer_rows)

    def _examples(self, splits: Splits, scan: Scan) -> list[dict[str, Any]]:
        """Return prompt, prompt ids and answer of the first held-out rows, the question read from the source again.

        The answer is what the labels say, so that it can be compared with what the model writes; one that was cut is
        taken from the source.
        """
        wanted = {example.ordinal: example for example in splits.first_held_out}
        examples: list[dict[str, Any]] = []
        for used in self._used_rows(scan) if wanted else ():
            if example := wanted.pop(used.ordinal, None):
                question, answer = _last_exchange(used.placed.row, self.recipe.data.train_on)
                if example.response_ids[-1] == self.prompts.stop_token_id:
                    answer = self.tokenizer.decode(example.response_ids[:-1])
                examples.append({"prompt": question, "prompt_ids": example.prompt_ids, "answer": answer})
            if not wanted:
                break
        return examples


def _encode(encoder: TurnEncoder, batch: RenderedBatch) -> tuple[RenderedBatch, list[EncodedTurn]]:
    """Return the batch with the ids of all its turns one after another, those of rows that can't be shown left out."""
    return batch, encoder.encode([turn for turns in batch.rendered if not isinstance(turns, Fault) for turn in turns])


def _counts(scan: Scan, written: Written, overflow: Overflow, splits: Splits) -> Counts:
    at_limit = overflow.at_limit()
    return Counts(
        num_rows=scan.num_rows,
        num_bad_rows=scan.num_bad_rows + written.num_bad_rows,
        num_train_rows=splits.num_train_rows,
        num_eval_rows=splits.num_eval_rows,
        num_truncated_rows=at_limit.num_truncated_rows,
        num_dropped_rows=at_limit.num_dropped_rows,
        response_tokens_lost=at_limit.response_tokens_lost,
        trained_tokens=splits.trained_tokens,
        longest_row=overflow.longest_row,
        num_duplicate_rows=scan.num_duplicate_rows,
        num_unused_rows=scan.num_unused_rows,
        num_repeated_rows=written.num_repeated_rows,
        num_split_rows=written.num_split_rows,
    )


def _parts(encoded: list[EncodedTurn], turns: Sequence[Turn], train_on: TrainOn) -> list[EncodedTurn] | Fault:
    """Return the rows that the turns of a conversation become, or why they can't be trained so."""
    if train_on == "all":
        whole = train_conversation(turns, encoded)
        return whole if isinstance(whole, Fault) else [whole]
    return _as_rows(join_turns(encoded)) if len(encoded) > 1 else encoded


def _as_rows(parts: list[EncodedTurn]) -> list[EncodedTurn]:
    """Mark all but the last of a conversation's parts as having no response to be asked for."""
    *others, last = parts
    return [*(one._replace(answer_start=len(one.prompt_ids) + len(one.response_ids)) for one in others), last]


def _goes_on(row: Conversation, train_on: TrainOn) -> bool:
    """Whether a conversation has turns after the last answer that is trained."""
    return not row.is_plain_text and row.trained_turns(train_on)[-1] < len(row.messages) - 1


def _last_exchange(row: Conversation, train_on: TrainOn) -> tuple[str, str]:
    """Return the last answer that is trained, and what the user said before it."""
    place = row.trained_turns(train_on)[-1]
    asked = [message.text for message in row.messages[:place] if message.role == "user"]
    return asked[-1], row.messages[place].content
