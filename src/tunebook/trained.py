"""The model of a finished run, loaded to be used."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.exported import exported_folder
from tunebook.finished import Finished
from tunebook.world import world_of


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer, and the way its rows were prompted."""

    model: Any
    tokenizer: Any
    prompts: Any


def load_trained(finished: Finished) -> Trained:
    """Load the base as it was trained on, and the adapter onto it; the whole model after a full fine-tune.

    Of a checkpoint, what the run would have left had it ended there.
    """
    with exported_folder(finished) as folder:
        return _load(finished, folder)


def _load(finished: Finished, folder: Path) -> Trained:
    from tunebook.quiet import quiet_libraries

    with quiet_libraries():
        from peft import PeftModel

        from tunebook.data.chat_prompts import build_prompts
        from tunebook.data.tokenizer import load_tokenizer
        from tunebook.model import load_base
        from tunebook.new_tokens import make_room

    recipe, plan = finished.recipe, finished.plan
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
