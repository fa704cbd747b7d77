"""Asking what came out of a run: one question at a time, the answer as it is written."""

import sys
from collections.abc import Iterable

from tunebook.finished import open_finished
from tunebook.trained import Trained, load_trained

MAX_NEW_TOKENS = 512


def chat(run_dir: str, lines: Iterable[str]) -> None:
    """Answer each line, greedily, with the adapter of a run; every line is a question of its own.

    Raises Refused where `run_dir` holds no run that came to its end.
    """
    trained = load_trained(open_finished(run_dir))
    if sys.stdin.isatty():
        print("Ask something; an empty line or Ctrl-D ends.", file=sys.stderr)
    for line in lines:
        question = line.strip()
        if not question:
            break
        _answer(trained, question)


def _answer(trained: Trained, question: str) -> None:
    import torch
    from transformers import GenerationConfig, TextStreamer

    from tunebook.data.conversation import pair
    from tunebook.data.tokens import TurnEncoder
    from tunebook.quiet import quiet_libraries

    tokenizer = trained.tokenizer
    [turns] = trained.prompts.render([pair(question, "-")])
    ids = TurnEncoder(tokenizer, trained.prompts).encode(turns)[0].prompt_ids
    stops = sorted({trained.prompts.stop_token_id, tokenizer.eos_token_id} - {None})
    settings = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    batch = torch.tensor([ids], device=trained.model.device)
    with quiet_libraries(), torch.no_grad():
        trained.model.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), generation_config=settings, streamer=streamer
        )
