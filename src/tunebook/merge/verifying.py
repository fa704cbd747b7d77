"""What a model says to fixed prompts: greedy text, and the logits of prompt and answer."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tunebook.errors import Refused
from tunebook.export.finished import Finished
from tunebook.export.past_base import lost_data
from tunebook.merge.computing import computed_in

MOST_PROMPTS = 4
# The end of a longer prompt stands for it. Logits of 4 x (128 + 16) tokens of a vocabulary of 152k take 350 MB.
LONGEST_PROMPT = 128
NEW_TOKENS = 16
# So many logits of a row are compared, those of the answer among them; each depends on all tokens before it.
LAST_POSITIONS = 32
# Asked where no row was held out, or the rows are no longer what the run was trained on.
QUESTIONS = ("Name a color.", "Count from one to ten.", "Why is the sky blue?", "Write one sentence about a dog.")


@dataclass(frozen=True)
class Probe:
    """What models are compared on: prompts of token ids, and the tokens that end an answer to them."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    pad_token_id: int


@dataclass(frozen=True)
class Reading:
    """What a model says to prompts and given answers.

    `logits` are those of the last positions of every row (positions x vocabulary, float32, CPU); `choices` holds, for
    each prompt, the token that the model would have chosen at each place of the answer.
    """

    logits: Any
    choices: tuple[tuple[int, ...], ...]


def build_probe(finished: Finished, tokenizer: Any) -> Probe:
    """Return prompts that the run held out, where they can still be read and are the same; else fixed questions.

    Where the recipe adds tokens to the vocabulary, the first prompt ends with them once more.
    """
    from tunebook.data.chat_prompts import build_prompts

    prompts = build_prompts(tokenizer, "alpaca" if finished.recipe.data.template == "alpaca" else "auto")
    asked = _held_out_prompts(finished)
    name = f"{len(asked)} held-out prompts" if asked else f"{len(QUESTIONS)} fixed questions"
    asked = asked or _question_ids(tokenizer, prompts)
    if tokens := finished.recipe.model.add_special_tokens:
        asked.append([*asked[0], *tokenizer.convert_tokens_to_ids(tokens)])
        name += " and one with the added tokens"
    stops = sorted({prompts.stop_token_id, tokenizer.eos_token_id} - {None})
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    return Probe(name, tuple(tuple(ids[-LONGEST_PROMPT:]) for ids in asked), tuple(stops), pad)


def answer_greedily(model: Any, probe: Probe) -> tuple[tuple[int, ...], ...]:
    """Return the ids of a transformers model's greedy answer to each prompt, with the stop token that ended it.

    The model's own generation settings are put aside, then back.
    """
    import torch
    from transformers import GenerationConfig

    longest = max(map(len, probe.prompts))
    # Padded on the left, so that all answers start at the same place.
    ids = torch.tensor([[probe.pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in probe.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in probe.prompts])
    settings, model.generation_config = model.generation_config, GenerationConfig()
    stops, pad = list(probe.stop_token_ids), probe.pad_token_id
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stops, pad_token_id=pad)
    try:
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)
    finally:
        model.generation_config = settings
    return tuple(_until_stop(row, stops) for row in made[:, longest:].tolist())


def read_model(model: Any, probe: Probe, answers: Sequence[Sequence[int]], dtype: Any = None) -> Reading:
    """Return what a model says to the probe's prompts, each followed by its answer.

    With a torch `dtype` it is computed in that type, whatever its weights are held in.
    """
    import torch

    rows = [[*prompt, *answer] for prompt, answer in zip(probe.prompts, answers, strict=True)]
    longest = max(map(len, rows))
    # Padded on the right, where no token of a row looks.
    ids = torch.tensor([row + [probe.pad_token_id] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.inference_mode(), nullcontext() if dtype is None else computed_in(model, dtype):
        made = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
        ends = [logits[: len(row)][-LAST_POSITIONS:] for logits, row in zip(made, rows, strict=True)]
        # The token after the prompt is chosen at the prompt's last place.
        chosen = [end[-len(answer) - 1 : -1].argmax(-1).tolist() for end, answer in zip(ends, answers, strict=True)]
        return Reading(torch.cat([end.float().cpu() for end in ends]), tuple(map(tuple, chosen)))


def _until_stop(row: list[int], stops: Sequence[int]) -> tuple[int, ...]:
    end = next((place for place, token in enumerate(row, 1) if token in stops), len(row))
    return tuple(row[:end])


def _held_out_prompts(finished: Finished) -> list[list[int]]:
    """Return the ids of the first prompts held out; none where the data is gone, or is not what it was."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of

    recipe = finished.recipe
    if not recipe.data.validation or lost_data(finished):
        return []
    try:
        data = prepare_data(recipe, tokenizer_of(recipe))
    except (Refused, OSError):
        return []
    if data.evaluation is None or data.data_fingerprint != finished.summary.get("data_fingerprint"):
        return []
    rows = [data.evaluation[number] for number in range(min(MOST_PROMPTS, len(data.evaluation)))]
    starts = [next((place for place, label in enumerate(row["labels"]) if label != -100), 0) for row in rows]
    return [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True) if start]


def _question_ids(tokenizer: Any, prompts: Any) -> list[list[int]]:
    from tunebook.data.conversation import pair
    from tunebook.data.tokens import TurnEncoder

    encoder = TurnEncoder(tokenizer, prompts)
    rendered = prompts.render([pair(question, "-") for question in QUESTIONS])
    return [encoder.encode(turns)[0].prompt_ids for turns in rendered]
