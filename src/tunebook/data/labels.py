"""Labelled rows: which ids are trained, what is cut at the length limit, and the Arrow table they are kept in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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

    `ordinal` is a row's place among the usable rows of the source, from 0; `prompt_length` counts the tokens before its
    last response, 0 where that was cut off.
    """
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    return pa.schema(
        {"input_ids": ids, "labels": ids, "length": pa.int32(), "ordinal": pa.int64(), "prompt_length": pa.int32()}
    )


def label_turns(turns: Sequence[EncodedTurn], ordinals: Sequence[int], max_length: int, tally: Tally) -> Any:
    """Return the turns that keep at least one label that counts, as one Arrow record batch of `label_schema`.

    `ordinals` holds the place of each among the usable rows; turns of one row share it.
    Rows are cut at the end to `max_length` tokens, so a cut row ends without the stop token. Labels follow positions
    alone: a pad token that is the stop token can't mask it. The first position is never predicted, hence never a label,
    should a template render no prompt at all.
    """
    kept = _KeptRows()
    for ordinal, turn in zip(ordinals, turns, strict=True):
        prompt_ids = turn.prompt_ids
        whole = len(prompt_ids) + len(turn.response_ids)
        length = _cut_length(turn, max_length)
        tally.longest_row = max(tally.longest_row, whole)
        if length <= max(1, len(prompt_ids)):
            tally.num_dropped_rows += 1
            tally.response_tokens_lost += _count_trained(turn, 0)
            continue
        tally.num_truncated_rows += whole > length
        tally.response_tokens_lost += _count_trained(turn, length - len(prompt_ids)) if whole > length else 0
        kept.add(ordinal, turn, length)
    return kept.build()


@dataclass
class _KeptRows:
    """Rows that stand one after another in `ids`; `gaps` are what is not trained between responses, as places in it."""

    ids: list[int] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_masked: list[int] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)

    def add(self, ordinal: int, turn: EncodedTurn, length: int) -> None:
        """Add the first `length` tokens of a turn."""
        num_prompt = len(turn.prompt_ids)
        begin = len(self.ids) + num_prompt
        self.gaps += [(begin + start, begin + end) for start, end in turn.gaps if num_prompt + end <= length]
        self.ids += turn.prompt_ids
        self.ids += turn.response_ids[: length - num_prompt]
        self.lengths.append(length)
        self.num_masked.append(max(1, num_prompt))
        self.ordinals.append(ordinal)
        answer_start = num_prompt if turn.answer_start is None else turn.answer_start
        # Cut before its last response, a row has no prompt that generation could answer.
        self.prompt_lengths.append(answer_start if answer_start < length else 0)

    def build(self) -> Any:
        """Return the rows as a record batch, the first labels of each and the gaps masked."""
        import numpy as np
        import pyarrow as pa

        ids, lengths = np.array(self.ids, np.int32), np.array(self.lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        borders = ends - lengths + np.array(self.num_masked, np.int32)
        labels = np.where(np.arange(len(ids)) < np.repeat(borders, lengths), np.int32(IGNORED), ids)
        for start, end in self.gaps:
            labels[start:end] = IGNORED
        offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(labels)),
            pa.array(self.lengths, pa.int32()),
            pa.array(self.ordinals, pa.int64()),
            pa.array(self.prompt_lengths, pa.int32()),
        ]
        return pa.record_batch(columns, schema=label_schema())


def _cut_length(turn: EncodedTurn, max_length: int) -> int:
    """Return the tokens that are kept: at most `max_length`, and none after the last response that is left."""
    length = min(len(turn.prompt_ids) + len(turn.response_ids), max_length)
    for start, end in turn.gaps:
        if len(turn.prompt_ids) + start < length <= len(turn.prompt_ids) + end:
            return len(turn.prompt_ids) + start
    return length


def _count_trained(turn: EncodedTurn, start: int) -> int:
    """Return how many tokens of `response_ids` from `start` on are trained."""
    in_gaps = sum(max(0, end - max(start, begin)) for begin, end in turn.gaps)
    return len(turn.response_ids) - start - in_gaps
