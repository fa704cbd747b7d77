"""The model of a finished run, loaded to be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused, is_out_of_memory
from tunebook.export.exported import exported_folder
from tunebook.export.finished import Finished
from tunebook.export.past_base import check_base
from tunebook.launching.world import World, world_of


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer, and the way its rows were prompted."""

    model: Any
    tokenizer: Any
    prompts: Any


def load_trained(finished: Finished, world: World | None = None) -> Trained:
    """Load the base as it was trained on, and the adapter onto it; the whole model after a full fine-tune.

    Of a checkpoint, what the run would have left had it ended there. It is on this process's own device of `world`, by
    default that of a single process.
    """
    if finished.recipe.lora is not None:
        check_base(finished)
    with exported_folder(finished) as folder:
        return _load(finished, folder, world or _world(finished))


def load_prompts(finished: Finished) -> tuple[Any, Any]:
    """Return the tokenizer of a finished run, and the way its rows were prompted; no weights are read."""
    with exported_folder(finished) as folder:
        return _load_prompts(finished, folder)


@contextmanager
def before_training(trained: Trained, finished: Finished, world: World | None = None) -> Iterator[Any]:
    """Give the model as the run began with it: its adapter switched off inside, or the base of a full fine-tune."""
    from tunebook.model.model import load_base
    from tunebook.system.quiet import quiet_libraries

    if finished.recipe.lora is not None:
        with quiet_libraries(), trained.model.disable_adapter():
            yield trained.model
    else:
        check_base(finished)
        with quiet_libraries():
            base = load_base(finished.recipe, finished.plan, world or _world(finished))
        yield base.eval()


def _load(finished: Finished, folder: Path, world: World) -> Trained:
    from tunebook.system.quiet import quiet_libraries

    with quiet_libraries():
        from peft import PeftModel

        from tunebook.model.model import load_base
        from tunebook.model.new_tokens import make_room, start_rows

    recipe, plan = finished.recipe, finished.plan
    tokenizer, prompts = _load_prompts(finished, folder)
    with quiet_libraries():
        if recipe.lora is None:
            whole = recipe.model.model_copy(update={"name_or_path": str(folder), "revision": None})
            model = load_base(replace(recipe, model=whole), plan, world)
        else:
            base = load_base(recipe, plan, world)
            if tokens := recipe.model.add_special_tokens:
                make_room(base, tokenizer)
                # What is seen of them with the adapter switched off is what the run began with.
                start_rows(base, tokenizer.convert_tokens_to_ids(tokens))
            with fitting(folder):
                model = PeftModel.from_pretrained(base, folder)
    return Trained(model.eval(), tokenizer, prompts)


@contextmanager
def fitting(adapter: Path) -> Iterator[None]:
    """Turn what peft raises where an adapter and its base do not fit into a refusal of one line."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160].rstrip(".")
        raise Refused(Problem(f"does not fit the base: {reason}", "See --base", str(adapter))) from error


def _load_prompts(finished: Finished, folder: Path) -> tuple[Any, Any]:
    from tunebook.data.chat_prompts import build_prompts
    from tunebook.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    # Another template than the Alpaca text was saved with the tokenizer.
    template = "alpaca" if finished.recipe.data.template == "alpaca" else "auto"
    return tokenizer, build_prompts(tokenizer, template)


def _world(finished: Finished) -> World:
    return world_of(1, "cuda" if finished.plan.device_type == "cuda" else "cpu")
