"""Asking what came out of a run: one question at a time, the answer as it is written."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.plan import Plan
from tunebook.planning import plan_without_data
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.schema import Recipe
from tunebook.run_folder import read_summary
from tunebook.world import count_gpus, world_of

MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer, and the way its rows were prompted."""

    model: Any
    tokenizer: Any
    prompts: Any


def chat(run_dir: str, lines: Iterable[str]) -> None:
    """Answer each line, greedily, with the adapter of a run; every line is a question of its own.

    Raises Refused where `run_dir` holds no run that came to its end.
    """
    recipe, plan = load_run(run_dir)
    trained = load_trained(recipe, plan)
    if sys.stdin.isatty():
        print("Ask something; an empty line or Ctrl-D ends.", file=sys.stderr)
    for line in lines:
        question = line.strip()
        if not question:
            break
        _answer(trained, question)


def load_run(run_dir: str) -> tuple[Recipe, Plan]:
    """Return the recipe of a finished run, and its plan for this machine."""
    folder = Path(run_dir)
    summary = read_summary(folder)
    if summary is None:
        fix = "Name a run folder, such as runs/tiny_qlora"
        raise Refused(Problem("no run_summary.json there", fix, run_dir))
    if summary.get("status") != "completed":
        raise Refused(Problem(f"the run is {summary.get('status')}, and left no adapter", where=run_dir))
    recipes = sorted(folder.glob("*.yaml"))
    if len(recipes) != 1:
        raise Refused(Problem(f"{len(recipes)} recipes are there, and a run has one", where=run_dir))
    recipe = load_recipe(str(recipes[0]))
    world = world_of(1, "cuda" if count_gpus() else "cpu")
    return recipe, plan_without_data(recipe, world, run_dir)


def load_trained(recipe: Recipe, plan: Plan) -> Trained:
    """Load the base as it was trained on, and the adapter onto it; the whole model after a full fine-tune."""
    from tunebook.quiet import quiet_libraries

    with quiet_libraries():
        from peft import PeftModel

        from tunebook.data.chat_prompts import build_prompts
        from tunebook.data.tokenizer import load_tokenizer
        from tunebook.model import load_base
        from tunebook.new_tokens import make_room

    folder = Path(plan.adapter_dir)
    tokenizer = load_tokenizer(str(folder))
    world = world_of(1, "cuda" if plan.device_type == "cuda" else "cpu")
    with quiet_libraries():
        if recipe.lora is None:
            whole = recipe.model.model_copy(update={"name_or_path": str(folder), "revision": None})
            model = load_base(replace(recipe, model=whole), plan, world)
        else:
            base = load_base(recipe, plan, world)
            if recipe.model.add_special_tokens:
                make_room(base, tokenizer)
            model = PeftModel.from_pretrained(base, folder)
    # Another template than the Alpaca text was saved with the tokenizer.
    template = "alpaca" if recipe.data.template == "alpaca" else "auto"
    return Trained(model.eval(), tokenizer, build_prompts(tokenizer, template))


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
