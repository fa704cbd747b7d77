"""Labelled rows: which ids are trained, what is cut at the length limit, and the Arrow table they are kept in."""

from collections.abc import Sequence
from typing import Any

from tunebook.data.overflow import Overflow
from tunebook.data.tokens import EncodedTurn

# The label that the loss leaves out, as torch's cross entropy has it (ignore_index).
IGNORED = -100


def label_schema() -> Any:
    """Return the Arrow schema of labelled rows before they are split.

    `ordinal` is a row's place among the usable rows of the source, from 0; `prompt_length` counts the tokens before its
    last response, 0 where that was cut off.
    """
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    return pa.schema(
        {"input_ids": ids, "labels": ids, "length": pa.int32(), "ordinal": pa.int64(), "prompt_length": pa.int32()}
    )


def label_turns(turns: Sequence[EncodedTurn], ordinals: Sequence[int], overflow: Overflow) -> Any:
    """Return the turns that keep at least one label that counts, as one Arrow record batch of `label_schema`.

    `ordinals` holds the place of each among the usable rows; copies and parts of one row share it. Rows are cut at the
    end, so a cut row ends without the stop token, or whole with an earlier response. Labels follow positions alone: a
    pad token that is the stop token can't mask it. The first position is never predicted, hence never a label, should
    a template render no prompt at all.
    """
    import numpy as np

    flat_ids, gaps = _join_ids(turns)
    num_prompt_ids = np.array([len(turn.prompt_ids) for turn in turns], np.int64)
    lengths = num_prompt_ids + np.array([len(turn.response_ids) for turn in turns], np.int64)
    row_of = np.repeat(np.arange(len(turns)), lengths)
    positions = np.arange(len(flat_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    counts = positions >= np.maximum(1, num_prompt_ids)[row_of]
    for start, end in gaps:
        counts[start:end] = False
    places = np.array(ordinals, np.int64)
    kept_lengths = overflow.kept_lengths(lengths, positions[counts], row_of[counts], places)
    starts = [len(turn.prompt_ids) if turn.answer_start is None else turn.answer_start for turn in turns]
    # Cut before its last response, a row has no prompt that generation could answer.
    prompt_lengths = np.where(np.array(starts, np.int64) < kept_lengths, starts, 0)
    ids = np.array(flat_ids, np.int32)
    labels = np.where(counts, ids, np.int32(IGNORED))
    is_token_kept, is_row_kept = positions < kept_lengths[row_of], kept_lengths > 0
    columns = [kept_lengths, places, prompt_lengths]
    return _build_batch(ids[is_token_kept], labels[is_token_kept], *(column[is_row_kept] for column in columns))


def _join_ids(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of all turns one after another, and the gaps between responses as places in them."""
    flat_ids: list[int] = []
    gaps: list[tuple[int, int]] = []
    for turn in turns:
        flat_ids += turn.prompt_ids
        if turn.gaps:
            begin = len(flat_ids)
            gaps += [(begin + start, begin + end) for start, end in turn.gaps]
        flat_ids += turn.response_ids
    return flat_ids, gaps


def _build_batch(ids: Any, labels: Any, lengths: Any, ordinals: Any, prompt_lengths: Any) -> Any:
    """Return rows, whose ids and labels stand one after another in `ids` and `labels`, as a record batch."""
    import numpy as np
    import pyarrow as pa

    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(labels)),
        pa.array(lengths, pa.int32()),
        pa.array(ordinals, pa.int64()),
        pa.array(prompt_lengths, pa.int32()),
    ]
    return pa.record_batch(columns, schema=label_schema())
