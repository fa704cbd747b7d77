"""`tunebook new`: a recipe for another model, and what is found when that model is looked at."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.launching.command import render_launch
from tunebook.launching.world import world_of
from tunebook.model.shapes import ModelShape, find_shape
from tunebook.plan.gpu_fit import plan_on_gpus, smallest_gpu
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import MemoryPlan
from tunebook.plan.plan import Plan, build_plan
from tunebook.plan.table import build_console, print_notes
from tunebook.recipe.copying import render_copy
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.schema import Recipe

OnGpus = tuple[MemoryPlan, dict[int, int | None]]


@dataclass(frozen=True)
class Look:
    """What config and tokenizer of a model tell, as lines of (what, text); `unread` says why it was not looked at."""

    lines: tuple[tuple[str, str], ...] = ()
    unread: str = ""


def create_recipe(target: str, source: str, model: str) -> None:
    """Write the recipe `target` for `model`, copied from `source` (a stem in recipes/, or a path), and print a look.

    Raises Refused, with nothing written, where the target exists or cannot be written, the source is no recipe, or the
    model cannot be trained with it. A Hub that cannot be reached, or a gated model, refuses nothing: it is said.
    """
    origin = find_source(source)
    check_target(target)
    if not model.isprintable():
        raise Refused(Problem(f"{model!r} is no name of a model", "Give a Hub id, or a local folder", "--model"))
    # A revision, a public name and a repository belong to the other model.
    overrides = [f"model.name_or_path={json.dumps(model)}", "model.revision=null", "model.base_id=null", "hub=null"]
    recipe = load_recipe(str(origin), overrides)
    text = with_schema(origin.read_bytes().decode("utf-8-sig"), origin, Path(target))
    model = recipe.model.name_or_path
    render_copy(text, model, "", str(origin))  # what cannot be copied is refused before the model is looked at
    plan = build_plan(recipe, world_of(1, "cuda"))
    look = look_at_model(recipe)
    shape = find_shape(recipe.model.name_or_path, recipe.model.revision)
    memory = None if shape is None else plan_on_gpus(recipe, plan, shape)
    title = f"# {model}, copied from {origin.name}.{_hardware(memory)}"
    write_new(Path(target), render_copy(text, model, title, str(origin)), model)
    console = build_console()
    console.print(f"{target}: {origin} with model.name_or_path: {model}", soft_wrap=True, markup=False)
    told = (*(look.lines or _known(shape)), *_planned(plan, shape), *_tell_memory(memory), *_commands(target))
    for what, text in told:
        console.print(f"  {what:<11}{text}", soft_wrap=True, markup=False)
    notes = [f"{look.unread}; the recipe is written all the same"] if look.unread else []
    print_notes([*plan.notes, *notes], console)


def find_source(name: str) -> Path:
    """Return the recipe that a name means: a path, or the stem of one in recipes/."""
    places = [Path(name), Path("recipes") / f"{name}.yaml", Path("recipes") / name]
    with suppress(OSError, RuntimeError):  # a name that is too long, a folder that may not be read, ~ of nobody
        places[0] = places[0].expanduser()
        for place in places if name else ():
            if place.is_file():
                return place
    from tunebook.recipe.values import nearest_word

    stems = sorted(path.stem for path in Path("recipes").glob("*.yaml"))
    near = nearest_word(Path(name).stem, stems) if name else ""
    fix = f"Nearest: {near}" if near else f"Recipes here: {', '.join(stems) or 'none; change to a clone of tunebook'}"
    message = f"no recipe {name}, and none of that name in recipes/" if name else "names no recipe"
    raise Refused(Problem(message, fix, where="--from"))


def check_target(name: str) -> None:
    """Raise Refused where no recipe can be written at the path `name`, or something is there already."""
    target, problems = Path(name), []
    if not target.name or not name.isprintable():
        fix = "Give for example recipes/mine.yaml"
        raise Refused(Problem(f"{name!r} is no name of a file", fix, "tunebook new"))
    if target.suffix not in (".yaml", ".yml"):
        problems.append(Problem("a recipe ends in .yaml", f"Write {target.with_suffix('.yaml')}", name))
    try:
        if target.exists() or target.is_symlink():
            problems.append(Problem("is there already", "Give another name, or delete it first", name))
        elif not target.parent.is_dir():
            fix = f"mkdir -p {shlex.quote(str(target.parent))}"
            problems.append(Problem(f"there is no folder {target.parent}", fix, name))
    except OSError as error:  # a name that is too long, a folder that may not be read
        problems.append(Problem(f"cannot be written: {error.strerror or error}", where=name))
    if problems:
        raise Refused(problems)


def with_schema(text: str, origin: Path, target: Path) -> str:
    """Return the text with the path of its JSON schema, relative to the recipe's folder, as target needs it."""

    def moved(found: re.Match[str]) -> str:
        schema = (origin.parent / found[2]).resolve()
        return found[1] + (os.path.relpath(schema, target.parent.resolve()) if schema.is_file() else found[2])

    return re.sub(r"(^# yaml-language-server: \$schema=)(\S+)", moved, text, count=1, flags=re.M)


def write_new(target: Path, text: str, model: str) -> None:
    """Write a recipe that was not there: whole, or not at all, never over another file, and only if it reads back."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(text.encode())
        assert load_recipe(str(beside)).model.name_or_path == model, "the copy reads back as it is meant"
        os.link(beside, target)
    except FileExistsError as error:
        raise Refused(Problem("is there already", "Give another name, or delete it first", str(target))) from error
    except OSError as error:
        raise Refused(Problem(f"cannot be written: {error.strerror or error}", where=str(target))) from error
    finally:
        beside.unlink(missing_ok=True)


def look_at_model(recipe: Recipe) -> Look:
    """Return what the model's tokenizer and config say; raises Refused where they say it cannot be trained."""
    from tunebook.data.tokenizer import HUB_SILENT, tokenizer_of
    from tunebook.system.quiet import quiet_libraries

    with quiet_libraries():
        from tunebook.data.chat_prompts import build_prompts
        from tunebook.model.model import build_hollow, check_base, load_architecture

        try:
            tokenizer = tokenizer_of(recipe)
            architecture = load_architecture(recipe)
        except Refused as refused:
            said = refused.problems[0].message
            if any(words in said for words in HUB_SILENT):
                return Look(unread=refused.problems[0].render())
            raise
        check_base(recipe, architecture, tokenizer)
        hollow = build_hollow(recipe, architecture)
        prompts = build_prompts(tokenizer, recipe.data.template)
    return Look((*_tell_model(hollow), *_tell_tokens(tokenizer, prompts.name, prompts.stop_token_id)))


def _tell_model(model: Any) -> Iterator[tuple[str, str]]:
    from tunebook.model.lora_targets import linear_names

    number = sum(parameter.numel() for parameter in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    positions = getattr(model.config, "max_position_embeddings", None)
    parts = [type(model).__name__, f"{number:,} parameters", f"embeddings {'tied' if tied else 'not tied'}"]
    parts += [f"{positions:,} positions"] if positions else []
    yield "model", ", ".join(parts)
    yield "targets", ", ".join(linear_names(model))
    yield "attention", str(model.config._attn_implementation)


def _tell_tokens(tokenizer: Any, template: str, stop: int) -> Iterator[tuple[str, str]]:
    yield "prompts", template
    yield "stop", f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})"
    own = "" if tokenizer.init_kwargs.get("pad_token") else ", a stand-in: it has none of its own"
    yield "padding", f"{tokenizer.pad_token} ({tokenizer.pad_token_id}){own}"


def _planned(plan: Plan, shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    trained = plan.trainable_parameters
    if trained is None or shape is None:
        yield "method", plan.method
    else:
        yield "method", f"{plan.method}, {trained:,} parameters trained ({trained / shape.num_parameters:.1%})"


def _hardware(memory: OnGpus | None) -> str:
    size = None if memory is None else smallest_gpu(memory[0])
    return "" if size is None else f" Hardware: 1 x {size} GB GPU, by its plan"


def _tell_memory(memory: OnGpus | None) -> Iterator[tuple[str, str]]:
    if memory is None:
        return
    planned, largest = memory
    yield "memory", f"{planned.needed / GIB:.1f} GiB for {planned.rows} rows of {planned.length:,} tokens at once"
    sizes = [f"{size} GiB: {f'up to {rows}' if rows else 'none'}" for size, rows in largest.items()]
    yield "rows", ", ".join(sizes)


def _known(shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    """Return what is known of a model that could not be looked at."""
    if shape is not None:
        tied = "tied" if shape.tied_embeddings else "not tied"
        yield "model", f"{shape.model_type}, {shape.num_parameters:,} parameters, embeddings {tied} ({shape.source})"
        yield "targets", ", ".join(sorted(name for name, _, _ in shape.linears))


def _commands(target: str) -> Iterator[tuple[str, str]]:
    yield "plan", shlex.join(["python", "finetune.py", target, "--plan", "--num-processes", "N"])
    yield "launch", render_launch("N", "cuda", ["finetune.py", target])
