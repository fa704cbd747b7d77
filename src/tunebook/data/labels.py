"""Labelled rows: which ids are trained, what is cut at the length limit, and the Arrow table they are kept in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.data.tokens import EncodedTurn

# The label that the loss leaves out, as torch's cross entropy has it (ignore_index).
IGNORED = -100


@dataclass
class Tally:
    """What the length limit did, counted while rows are labelled."""

    num_truncated_rows: int = 0  # kept, with a shorter response
    num_dropped_rows: int = 0  # without any response token left
    response_tokens_lost: int = 0  # of truncated and of dropped rows
    longest_row: int = 0  # tokens before anything was cut


def label_schema() -> Any:
    """Return the Arrow schema of labelled rows before they are split.

    `ordinal` is a row's place among the usable rows of the source, from 0; `prompt_length` is in tokens.
    """
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    return pa.schema(
        {"input_ids": ids, "labels": ids, "length": pa.int32(), "ordinal": pa.int64(), "prompt_length": pa.int32()}
    )


def label_turns(turns: Sequence[EncodedTurn], first_ordinal: int, max_length: int, tally: Tally) -> Any:
    """Return the turns that keep at least one label that counts, as one Arrow record batch of `label_schema`.

    Rows are cut at the end to `max_length` tokens, so a cut row ends without the stop token. Labels follow positions
    alone: a pad token that is the stop token can't mask it. The first position is never predicted, hence never a label,
    should a template render no prompt at all.
    """
    flat_ids: list[int] = []
    lengths, num_masked, ordinals, prompt_lengths = [], [], [], []
    for ordinal, (prompt_ids, response_ids) in enumerate(turns, start=first_ordinal):
        whole = len(prompt_ids) + len(response_ids)
        length = min(whole, max_length)
        tally.longest_row = max(tally.longest_row, whole)
        masked = max(1, len(prompt_ids))
        if length <= masked:
            tally.num_dropped_rows += 1
            tally.response_tokens_lost += len(response_ids)
            continue
        tally.num_truncated_rows += whole > length
        tally.response_tokens_lost += whole - length
        flat_ids += prompt_ids
        flat_ids += response_ids[: length - len(prompt_ids)]
        lengths.append(length)
        num_masked.append(masked)
        ordinals.append(ordinal)
        prompt_lengths.append(len(prompt_ids))
    return _build_batch(flat_ids, lengths, num_masked, ordinals, prompt_lengths)


def _build_batch(
    flat_ids: list[int], lengths: list[int], num_masked: list[int], ordinals: list[int], prompt_lengths: list[int]
) -> Any:
    """Return rows that stand one after another in `flat_ids` as a record batch, the first labels of each masked."""
    import numpy as np
    import pyarrow as pa

    ids = np.array(flat_ids, np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - np.array(lengths, np.int32)
    is_masked = np.arange(len(ids)) < np.repeat(starts + np.array(num_masked, np.int32), lengths)
    labels = np.where(is_masked, np.int32(IGNORED), ids)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(labels)),
        pa.array(lengths, pa.int32()),
        pa.array(ordinals, pa.int64()),
        pa.array(prompt_lengths, pa.int32()),
    ]
    return pa.record_batch(columns, schema=label_schema())
