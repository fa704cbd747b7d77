"""What a model says to fixed prompts: the logits at the end of whole rows, and greedy text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.computing import computed_in
from tunebook.errors import Refused
from tunebook.finished import Finished

MOST_ROWS = 4
LONGEST_ROW = 256
# So many logits of a row are compared: 4 x 32 of a vocabulary of 152k take 78 MB, and each depends on all before it.
LAST_POSITIONS = 32
NEW_TOKENS = 24
# Asked where no row was held out, or the rows are no longer what the run was trained on.
QUESTIONS = ("Name a color.", "Count from one to ten.", "Why is the sky blue?", "Write one sentence about a dog.")


@dataclass(frozen=True)
class Probe:
    """What models are compared on: whole rows of token ids, the prompts among them, and where an answer stops."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    pad_token_id: int


@dataclass(frozen=True)
class Reading:
    """Logits of the last positions of each row (positions x vocabulary, float32, CPU), and the ids of each answer."""

    logits: Any
    answers: tuple[tuple[int, ...], ...]


def build_probe(finished: Finished, tokenizer: Any) -> Probe:
    """Return rows that the run held out, where they can still be read and are the same; else fixed questions.

    One more row has the tokens that the recipe added to the vocabulary.
    """
    from tunebook.data.chat_prompts import build_prompts

    prompts = build_prompts(tokenizer, "alpaca" if finished.recipe.data.template == "alpaca" else "auto")
    held_out = _held_out_rows(finished)
    if held_out:
        name = f"{len(held_out)} held-out rows" if len(held_out) > 1 else "1 held-out row"
        rows = [ids for ids, _ in held_out]
        asked = [ids[:start] for ids, start in held_out]
    else:
        name = f"{len(QUESTIONS)} fixed questions"
        rows = asked = _question_ids(tokenizer, prompts)
    if tokens := finished.recipe.model.add_special_tokens:
        rows = [*rows, [*asked[0], *tokenizer.convert_tokens_to_ids(tokens)]]
        name += " and the added tokens"
    stops = sorted({prompts.stop_token_id, tokenizer.eos_token_id} - {None})
    cut = tuple(tuple(row[:LONGEST_ROW]) for row in rows)
    return Probe(name, cut, tuple(tuple(ids[:LONGEST_ROW]) for ids in asked), tuple(stops), tokenizer.pad_token_id)


def read_model(model: Any, probe: Probe, answers: bool = True) -> Reading:
    """Return what a model says to the probe's rows and, with `answers`, to its prompts; a row at a time, unpadded."""
    import torch

    kept = []
    with torch.inference_mode():
        for row in probe.rows:
            ids = torch.tensor([row], device=model.device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            kept.append(logits[0, -LAST_POSITIONS:].float().cpu())
        said = tuple(_answer(model, prompt, probe) for prompt in probe.prompts) if answers else ()
    return Reading(torch.cat(kept), said)


def read_in(dtype: Any, model: Any, probe: Probe, answers: bool = True) -> Reading:
    """Return what a model says when it is computed in a torch type, whatever its weights are held in."""
    with computed_in(model, dtype):
        return read_model(model, probe, answers)


def _answer(model: Any, prompt: Sequence[int], probe: Probe) -> tuple[int, ...]:
    """Return the ids of a greedy answer, its stop token left out, without the model's own generation settings."""
    import torch
    from transformers import GenerationConfig

    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    settings, bare.generation_config = bare.generation_config, GenerationConfig()
    stops = list(probe.stop_token_ids)
    greedy = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stops, pad_token_id=probe.pad_token_id
    )
    ids = torch.tensor([list(prompt)], device=bare.device)
    try:
        made = bare.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    finally:
        bare.generation_config = settings
    answer = made[0, len(prompt) :].tolist()
    return tuple(answer[:-1] if answer and answer[-1] in stops else answer)


def _held_out_rows(finished: Finished) -> list[tuple[list[int], int]]:
    """Return ids, and where the answer begins, of the first rows held out; none where the data is not what it was."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of

    recipe = finished.recipe
    if not recipe.data.validation:
        return []
    try:
        data = prepare_data(recipe, tokenizer_of(recipe))
    except (Refused, OSError):
        return []
    if data.evaluation is None or data.data_fingerprint != finished.summary.get("data_fingerprint"):
        return []
    rows = [data.evaluation[number] for number in range(min(MOST_ROWS, len(data.evaluation)))]
    starts = [next((place for place, label in enumerate(row["labels"]) if label != -100), 0) for row in rows]
    return [(row["input_ids"], start) for row, start in zip(rows, starts, strict=True) if start]


def _question_ids(tokenizer: Any, prompts: Any) -> list[list[int]]:
    from tunebook.data.conversation import pair
    from tunebook.data.tokens import TurnEncoder

    encoder = TurnEncoder(tokenizer, prompts)
    rendered = prompts.render([pair(question, "-") for question in QUESTIONS])
    return [encoder.encode(turns)[0].prompt_ids for turns in rendered]
