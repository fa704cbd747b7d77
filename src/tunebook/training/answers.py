"""Greedy answers of the model to held-out prompts, and how many are right word for word."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tunebook.data.prepare import HeldOutExample, PreparedData
from tunebook.launching.world import World
from tunebook.training.collectives import gather_shares
from tunebook.training.decoding import answering, batches_by_length, limits_of, stop_ids, write_batch
from tunebook.training.stopping import StopVote

ANSWER_BATCH_SIZE = 32
# An answer may run on a little past the longest right one before it is cut, so that running on shows.
ANSWER_MARGIN_TOKENS = 8
# Longer answers are cut: none of that length is matched word for word, and writing them takes minutes.
MAX_ANSWER_TOKENS = 256


def greedy_answers(  # noqa: PLR0913, PLR0917 - the vote and the limit are optional
    model: Any,
    tokenizer: Any,
    data: PreparedData,
    world: World,
    compute_dtype: str,
    vote: StopVote | None = None,
    most_tokens: int = MAX_ANSWER_TOKENS,
    most_positions: float = math.inf,
) -> list[str]:
    """Return the model's answer to each of `data.examples`, in order, on every process.

    Each process of the world answers its share; the adapter is used as it stands, without sampling and without the
    base's own generation settings, and an answer ends at `data.stop_token_id`, at the tokenizer's end token or after
    `most_tokens`. Prompts that are answered together have at most `most_positions` with their answers: a run passes the
    positions of its micro-batch, for which there is memory. The model is left in the mode it was found in. With a vote,
    StopAgreed is raised on all of them after a signal.
    """
    examples = data.examples
    stops, room = stop_ids(tokenizer, data.stop_token_id), answer_room(tokenizer, examples, most_tokens)
    # Every forward pass of a sharded model is a meeting of all processes, so there each answers all prompts.
    share = examples if world.shards else examples[world.rank :: world.num_processes]
    prompts = [example.prompt_ids for example in share]
    answers = [""] * len(share)
    with answering(model, getattr(torch, compute_dtype)) as bare_model:
        limits = limits_of(bare_model.config)
        for places, max_new_tokens in batches_by_length(prompts, ANSWER_BATCH_SIZE, room, limits, most_positions):
            if vote is not None and vote.is_asked and not world.shards:
                break
            asked = [prompts[place] for place in places]
            for place, written in zip(
                places, write_batch(bare_model, tokenizer, asked, stops, max_new_tokens), strict=True
            ):
                answers[place] = tokenizer.decode(written.ids)
    if vote is not None:
        vote.agree()
    return answers if world.shards else gather_shares(answers)


def answer_room(tokenizer: Any, examples: Sequence[HeldOutExample], most_tokens: int) -> int:
    """Return how many tokens an answer may have, by the longest right one."""
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    longest = max((len(encode(one.answer)) for one in examples), default=0)
    return min(longest + ANSWER_MARGIN_TOKENS, most_tokens)


def num_exact_matches(examples: Sequence[HeldOutExample], answers: Sequence[str]) -> int:
    """Return how many answers equal the example's answer, white space at both ends aside."""
    return sum(one.answer.strip() == answer.strip() for one, answer in zip(examples, answers, strict=True))
