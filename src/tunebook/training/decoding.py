"""Answers in batches: padded on the left, each ended by its own stop token, the same text whatever shares its batch."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from tunebook.system.quiet import quiet_libraries


class Limits(NamedTuple):
    """What a model's positions allow: `positions` are those it reads at most, None where its config tells nothing.

    Past `alone_from` a row is answered alone: long-rope turns all rows of a batch by other frequencies there
    (transformers, modeling_rope_utils.dynamic_rope_update).
    """

    positions: int | None = None
    alone_from: int | None = None


class Batch(NamedTuple):
    """Which prompts are answered together, by their places, and how many tokens each of their answers may have."""

    places: list[int]
    max_new_tokens: int


class Written(NamedTuple):
    """The tokens of an answer without the one that ended it; `is_whole` is False where the room ended it."""

    ids: list[int]
    is_whole: bool


def stop_ids(tokenizer: Any, stop_token_id: int, settings: GenerationConfig | None = None) -> list[int]:
    """Return the ids that end an answer: the token that ends a turn, and the tokenizer's end token.

    Those of the base's own generation settings, where they are given, are among the exported ones, too.
    """
    given = settings.eos_token_id if settings is not None else None
    more = given if isinstance(given, list) else [given]
    return sorted({stop_token_id, tokenizer.eos_token_id, *more} - {None})


def limits_of(model_config: Any) -> Limits:
    """Return the limits of a model by its transformers config."""
    config = model_config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    is_long = rope.get("rope_type") == "longrope"
    original = rope.get("original_max_position_embeddings") if is_long else None
    return Limits(positions if isinstance(positions, int) and positions > 0 else None, original)


def batches_by_length(
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    max_new_tokens: int,
    limits: Limits,
    most_positions: float = math.inf,
) -> Iterator[Batch]:
    """Yield batches of prompts of like length, the shortest first.

    A batch of several has at most `most_positions`: its rows times the longest prompt and what an answer may have.
    A prompt near the end of the model's positions shares a batch only with those that have the same room left, so that
    what an answer may have depends on its own prompt alone. Every prompt must be shorter than `limits.positions`.
    """
    positions, alone_from = limits
    lengths = [len(ids) for ids in prompts]
    rooms = [max_new_tokens if positions is None else min(max_new_tokens, positions - length) for length in lengths]
    ends = [length + room for length, room in zip(lengths, rooms, strict=True)]
    is_alone = [alone_from is not None and end > alone_from for end in ends]
    by_length = sorted(range(len(prompts)), key=lengths.__getitem__)
    for (room, alone), group in groupby(by_length, key=lambda place: (rooms[place], is_alone[place])):
        places, size = list(group), 1 if alone else batch_size
        while places:
            count = 1
            while count < min(size, len(places)) and (count + 1) * (lengths[places[count]] + room) <= most_positions:
                count += 1
            yield Batch(places[:count], room)
            places = places[count:]


def write_batch(  # noqa: PLR0913, PLR0917 - how it is drawn and where it is shown are optional
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[int],
    max_new_tokens: int,
    sampling: "SeededSampling | None" = None,
    streamer: Any = None,
) -> list[Written]:
    """Return the answer to each prompt (its ids), the likeliest token at each place, or as `sampling` draws it.

    `model` is what `answering` gives. Positions count each prompt's own tokens: transformers makes them of the mask.
    """
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    longest = max(map(len, prompts))
    # Padded on the left, so that every answer starts at the same place.
    input_ids = torch.tensor([[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=stops, pad_token_id=pad_token_id
    )
    made = model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([sampling] if sampling else []),
        streamer=streamer,
    )
    return [_cut_at_stop(ids, stops) for ids in made[:, longest:].tolist()]


def _cut_at_stop(ids: list[int], stops: Sequence[int]) -> Written:
    """Cut at the stop, and leave nothing else out: a special token inside an answer is a mistake that should show."""
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    return Written(ids[:end], end is not None)


class SeededSampling(LogitsProcessor):  # type: ignore[misc]
    """Draws the tokens of each row from a generator of its own, so that a row's text depends on no other row.

    The largest of score / temperature + Gumbel noise is a draw from the softmax of score / temperature (Gumbel 1954;
    Maddison, Tarlow and Minka 2014, A* Sampling).
    """

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores of shape (rows, vocabulary) of which the largest is the token drawn."""
        num_tokens = scores.shape[-1]
        drawn = [torch.rand(num_tokens, generator=one, dtype=torch.float64) for one in self._generators]
        noise = -torch.log(-torch.log(torch.stack(drawn)))
        return scores.double() / self._temperature + noise.to(scores.device)


@contextlib.contextmanager
def answering(model: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Give the transformers model inside, in eval mode (which checkpoints no activations), in the training precision.

    Its own generation settings (a sampling temperature, a repetition penalty) are put aside, then back.
    """
    bare_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_training, settings = model.training, bare_model.generation_config
    bare_model.generation_config = GenerationConfig()
    model.eval()
    autocast = torch.autocast(bare_model.device.type, dtype=dtype, enabled=dtype != torch.float32)
    try:
        with quiet_libraries(), torch.no_grad(), autocast:
            yield bare_model
    finally:
        bare_model.generation_config = settings
        model.train(was_training)
