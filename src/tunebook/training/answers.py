"""Greedy answers of the model to held-out prompts, and how many are right word for word."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from transformers import GenerationConfig

from tunebook.data.prepare import HeldOutExample, PreparedData
from tunebook.quiet import quiet_libraries
from tunebook.training.collectives import gather_shares
from tunebook.training.stopping import StopVote
from tunebook.world import World

ANSWER_BATCH_SIZE = 32
# An answer may run on a little past the longest right one before it is cut, so that running on shows.
ANSWER_MARGIN_TOKENS = 8
# Longer answers are cut: none of that length is matched word for word, and writing them takes minutes.
MAX_ANSWER_TOKENS = 256


def greedy_answers(  # noqa: PLR0913, PLR0917 - the vote is optional
    model: Any,
    tokenizer: Any,
    data: PreparedData,
    world: World,
    compute_dtype: str,
    vote: StopVote | None = None,
) -> list[str]:
    """Return the model's answer to each of `data.examples`, in order, on every process.

    Each process of the world answers its share; the adapter is used as it stands, without sampling and without the
    base's own generation settings, and an answer ends at `data.stop_token_id` or at the tokenizer's end token. The
    model is left in the mode it was found in. With a vote, StopAgreed is raised on all of them after a signal.
    """
    examples = data.examples
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    longest = max((len(encode(one.answer)) for one in examples), default=0)
    max_new_tokens = min(longest + ANSWER_MARGIN_TOKENS, MAX_ANSWER_TOKENS)
    # Every forward pass of a sharded model is a meeting of all processes, so there each answers all prompts.
    share = examples if world.shards else examples[world.rank :: world.num_processes]
    # Prompts of like length share a batch, and get back to their places afterwards.
    by_length = sorted(range(len(share)), key=lambda place: len(share[place].prompt_ids))
    answers = [""] * len(share)
    with _answering(model, getattr(torch, compute_dtype)) as bare_model:
        for start in range(0, len(share), ANSWER_BATCH_SIZE):
            if vote is not None and vote.is_asked and not world.shards:
                break
            places = by_length[start : start + ANSWER_BATCH_SIZE]
            prompts = [share[place].prompt_ids for place in places]
            texts = _answer_batch(bare_model, tokenizer, prompts, data.stop_token_id, max_new_tokens)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text
    if vote is not None:
        vote.agree()
    return answers if world.shards else gather_shares(answers)


def num_exact_matches(examples: Sequence[HeldOutExample], answers: Sequence[str]) -> int:
    """Return how many answers equal the example's answer, white space at both ends aside."""
    return sum(one.answer.strip() == answer.strip() for one, answer in zip(examples, answers, strict=True))


def _answer_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], stop_token_id: int, max_new_tokens: int
) -> list[str]:
    stops = sorted({stop_token_id, tokenizer.eos_token_id} - {None})
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_token_id
    longest = max(map(len, prompts))
    # Padded on the left, so that every answer starts at the same position.
    input_ids = torch.tensor([[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=stops, pad_token_id=pad_token_id
    )
    made = model.generate(
        input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
    )
    # Cut at the stop, and nothing else left out: a special token inside an answer is a mistake that should show.
    answers = [list(takewhile(lambda token: token not in stops, row)) for row in made[:, longest:].tolist()]
    texts: list[str] = tokenizer.batch_decode(answers)
    return texts


@contextlib.contextmanager
def _answering(model: Any, dtype: torch.dtype) -> Iterator[Any]:
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
