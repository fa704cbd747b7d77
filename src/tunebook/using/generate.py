"""Answers to a file of prompts, in its order, the same whatever the size of a batch."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.data.conversation import Fault
from tunebook.errors import Problem, Refused
from tunebook.export.finished import Finished, open_finished
from tunebook.export.past_base import check_base
from tunebook.plan.arithmetic import counted
from tunebook.system.out_files import check_out, write_out
from tunebook.using.prompt_files import PlacedPrompt, bad_prompts, read_prompts
from tunebook.using.trained import load_prompts, load_trained

SILENT_SECONDS = 10.0


@dataclass(frozen=True)
class Drawing:
    """How answers are made: greedily at a temperature of 0, else drawn with a seed; `max_new_tokens` is the longest."""

    batch_size: int = 8
    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0


def generate(run_dir: str, prompts: str, out: str, drawing: Drawing, base: str | None = None) -> None:
    """Answer the prompts of a file with the model of a finished run and write `out`, a line of JSON for each.

    Each line has the prompt (`prompt`, or `messages` and `tools`), `answer`, `finish_reason` (stop, or length where
    the answer was cut), `prompt_tokens` and `answer_tokens` (without the token that ended it). `base` is where the base
    lies now. Raises Refused before
    weights load where run, prompts or `out` can't be used.
    """
    finished = open_finished(run_dir, base)
    check_base(finished)
    path = check_out(out, finished.folder, [prompts])
    placed = read_prompts(prompts, finished.recipe.data.all_sources())
    ids = find_prompt_ids(finished, placed, prompts)
    answers = write_answers(finished, ids, drawing)
    lines = [
        json.dumps(
            {**shown_prompt(one), **answer, "prompt_tokens": len(asked), "answer_tokens": number}, ensure_ascii=False
        )
        for one, asked, (answer, number) in zip(placed, ids, answers, strict=True)
    ]
    write_out(path, "".join(f"{line}\n" for line in lines))
    cut = sum(answer["finish_reason"] == "length" for answer, _ in answers)
    note = f", {cut} of them cut at the limit" if cut else ""
    print(f"{counted(len(lines), 'answer')}{note}: {path}")


def find_prompt_ids(finished: Finished, placed: Sequence[PlacedPrompt], path: str) -> list[list[int]]:
    """Return the ids of each prompt. Raises Refused with those that the model can't be shown or that it can't read."""
    from tunebook.model.model import load_architecture
    from tunebook.training.decoding import limits_of
    from tunebook.using.asking import Asking

    positions = limits_of(load_architecture(finished.recipe)).positions
    found = Asking(*load_prompts(finished)).prompt_ids([one.asked for one in placed])
    ids, problems = [], []
    for prompt, one in zip(found, placed, strict=True):
        if isinstance(prompt, Fault):
            problems.append(Problem(prompt.reason, where=one.where))
        elif positions is not None and len(prompt) >= positions:
            message = f"the prompt has {len(prompt)} tokens, and the model reads {positions}"
            problems.append(Problem(message, where=one.where))
        else:
            ids.append(prompt)
    if problems:
        raise bad_prompts(problems, len(placed), path)
    return ids


def write_answers(
    finished: Finished, prompts: Sequence[list[int]], drawing: Drawing
) -> list[tuple[dict[str, str], int]]:
    """Return answer and finish reason for each prompt, and how many tokens the answer has."""
    import torch

    from tunebook.training.decoding import (
        SeededSampling,
        answering,
        batches_by_length,
        limits_of,
        stop_ids,
        write_batch,
    )

    trained = load_trained(finished)
    tokenizer, settings = trained.tokenizer, trained.model.generation_config
    stops = stop_ids(tokenizer, trained.prompts.stop_token_id, settings)
    answers: list[tuple[dict[str, str], int]] = [({}, 0)] * len(prompts)
    report = _Progress(len(prompts))
    with answering(trained.model, getattr(torch, finished.plan.compute_dtype)) as model:
        limits = limits_of(model.config)
        for places, room in batches_by_length(prompts, drawing.batch_size, drawing.max_new_tokens, limits):
            seeds = [_row_seed(drawing.seed, place) for place in places]
            sampling = SeededSampling(drawing.temperature, seeds) if drawing.temperature else None
            asked = [prompts[place] for place in places]
            for place, written in zip(places, write_batch(model, tokenizer, asked, stops, room, sampling), strict=True):
                reason = "stop" if written.is_whole else "length"
                text = tokenizer.decode(written.ids, clean_up_tokenization_spaces=False)
                answers[place] = ({"answer": text, "finish_reason": reason}, len(written.ids))
            report.count(len(places))
    return answers


def shown_prompt(prompt: PlacedPrompt) -> dict[str, Any]:
    """Return what was asked: `prompt` for one text of the user, else `messages`, and `tools` where there are any."""
    messages, tools = prompt.asked.messages, prompt.asked.tools
    if len(messages) == 1 and not tools and not messages[0].more:
        return {"prompt": messages[0].text}
    shown: dict[str, Any] = {"messages": [message.for_template() for message in messages]}
    return shown | ({"tools": list(tools)} if tools else {})


def check_drawing(drawing: Drawing, is_seed_given: bool) -> None:
    """Raise Refused for a temperature that is none, and for a seed that nothing is drawn with."""
    if not 0 <= drawing.temperature < float("inf"):
        raise Refused(Problem(f"--temperature is {drawing.temperature}", "Give a number from 0 on", "command line"))
    if is_seed_given and not drawing.temperature:
        raise Refused(Problem("--seed is for drawing answers", "Add --temperature, such as 0.7", "command line"))


def _row_seed(seed: int, place: int) -> int:
    """Return the seed of one row: hashed, so that row 1 of one seed is not row 0 of the next."""
    return int.from_bytes(hashlib.sha256(f"{seed},{place}".encode()).digest()[:8])


class _Progress:
    """Says on stderr how many prompts are answered, at most every SILENT_SECONDS."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts, self._num_done, self._said = num_prompts, 0, time.monotonic()

    def count(self, num_answered: int) -> None:
        """Take note of more answers."""
        self._num_done += num_answered
        if time.monotonic() - self._said >= SILENT_SECONDS:
            self._said = time.monotonic()
            print(f"answered {self._num_done:,} of {self._num_prompts:,}", file=sys.stderr, flush=True)
