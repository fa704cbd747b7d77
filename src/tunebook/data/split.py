"""The validation split: a share of the rows, drawn with a seed, the same on every machine and process count."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tunebook.data.drawing import Draw
from tunebook.data.labels import IGNORED

TRAIN_FILE = "train.arrow"
EVALUATION_FILE = "eval.arrow"
# prompt_length is for asking the model for the last answer of a row again, once it is trained.
KEPT_COLUMNS = ["input_ids", "labels", "length", "prompt_length"]


@dataclass(frozen=True)
class HeldOut:
    """How to split: `num_held_out` of `num_rows` rows; the first `num_first` of them are returned for comparison.

    Rows with the same ordinal (the parts of one conversation, copies) count as one and are never separated.
    """

    num_rows: int
    num_held_out: int
    seed: int
    num_first: int


class HeldOutIds(NamedTuple):
    """A held-out row at its last response: the ids before it, and its own."""

    ordinal: int
    prompt_ids: list[int]
    response_ids: list[int]


@dataclass
class Splits:
    """What was written. `first_held_out` holds the first held-out rows in file order that have a prompt."""

    num_train_rows: int = 0
    num_eval_rows: int = 0
    trained_tokens: int = 0  # labels that count in the training rows
    first_held_out: list[HeldOutIds] = field(default_factory=list)


def write_splits(labelled: Path, folder: Path, held_out: HeldOut) -> Splits:
    """Write the rows of `labelled` (an Arrow stream of `label_schema`) to `folder` as two streams, in their order."""
    import pyarrow as pa

    splits = Splits()
    with (
        pa.memory_map(str(labelled)) as source,
        pa.ipc.open_stream(source) as reader,
        # Python's own files, so that a full disk is an OSError with its errno.
        (folder / TRAIN_FILE).open("wb") as train_file,
        (folder / EVALUATION_FILE).open("wb") as evaluation_file,
        pa.ipc.new_stream(train_file, _kept_schema(reader.schema)) as train,
        pa.ipc.new_stream(evaluation_file, _kept_schema(reader.schema)) as evaluation,
    ):
        for rows, is_held_out in _draw_batches(reader, held_out):
            held_out_rows, training_rows = rows.filter(pa.array(is_held_out)), rows.filter(pa.array(~is_held_out))
            train.write_batch(training_rows.select(KEPT_COLUMNS))
            evaluation.write_batch(held_out_rows.select(KEPT_COLUMNS))
            _count(splits, held_out_rows, training_rows, held_out.num_first)
    return splits


def _kept_schema(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in KEPT_COLUMNS])


def _draw_batches(reader: Any, held_out: HeldOut) -> Iterator[tuple[Any, Any]]:
    """Yield each record batch with a bool array that says which of its rows are held out."""
    import numpy as np

    generator = Draw(held_out.num_rows, held_out.num_held_out, held_out.seed)
    for rows in reader:
        ordinals = rows.column("ordinal").to_pylist()
        yield rows, np.fromiter((generator.draw(ordinal) for ordinal in ordinals), bool, count=len(ordinals))


def _count(splits: Splits, held_out_rows: Any, training_rows: Any, num_first: int) -> None:
    """Add one batch to the counts, and its first held-out rows while they are fewer than `num_first`."""
    import numpy as np

    splits.num_train_rows += training_rows.num_rows
    splits.num_eval_rows += held_out_rows.num_rows
    labels = training_rows.column("labels").flatten().to_numpy()
    splits.trained_tokens += int(np.count_nonzero(labels != IGNORED))
    known = {example.ordinal for example in splits.first_held_out}
    if len(known) >= num_first:
        return
    for row in held_out_rows.select(["ordinal", "input_ids", "prompt_length"]).to_pylist():
        ids, border = row["input_ids"], row["prompt_length"]
        if border and row["ordinal"] not in known and len(known) < num_first:
            known.add(row["ordinal"])
            splits.first_held_out.append(HeldOutIds(row["ordinal"], ids[:border], ids[border:]))
