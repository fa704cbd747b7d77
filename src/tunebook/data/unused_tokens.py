"""New tokens that no row holds: their rows of the embedding learn nothing, which is mostly a name that is mistyped."""

from collections.abc import Sequence
from typing import Any


def unused_token_notes(train: Any, tokenizer: Any, tokens: Sequence[str]) -> list[str]:
    """Return a note for the tokens of `model.add_special_tokens` that stand in no training row."""
    if not tokens:
        return []
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = dict(zip(tokenizer.convert_tokens_to_ids(list(tokens)), tokens, strict=True))
    for column in train.data.column("input_ids").chunks:
        ids = column.flatten()
        wanted = pa.array(list(missing), ids.type)
        for found in pc.unique(pc.filter(ids, pc.is_in(ids, wanted))).to_pylist():
            del missing[found]
        if not missing:
            return []
    verb = "stands" if len(missing) == 1 else "stand"
    named = ", ".join(missing.values())
    return [f"{named} (model.add_special_tokens) {verb} in no training row, and learns nothing there: is it mistyped?"]
