"""The model card of what came out of a run, made from the run: README.md of the adapter folder.

Metadata are those that the Hub reads, written by huggingface_hub; what is not known is left out, never made up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import Any

from tunebook import __version__
from tunebook.card.code import Kind, prompt_note, render_asking, render_loading
from tunebook.card.licence import Licence
from tunebook.card.public_text import cell, shown_value
from tunebook.card.text import (
    adapter_notes,
    limits_of,
    measured_on,
    measured_rows,
    pipeline_note,
    plan_rows,
    receipt_rows,
    rows_text,
    source_rows,
    whole_batch,
)
from tunebook.recipe.schema import Recipe
from tunebook.system.secret_text import hide_tokens

PICTURE = "loss.png"


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of: the recipe as it was run, plan.json and run_summary.json, and the licence of the base.

    `step` is that of a checkpoint, None for the end of the run; the summary then holds what was measured up to it.
    """

    recipe: Recipe
    plan: Mapping[str, Any]
    summary: Mapping[str, Any]
    licence: Licence | None = None
    step: int | None = None

    @property
    def kind(self) -> Kind:
        """Whether an adapter came out, or the whole model of a full fine-tune."""
        return "model" if self.recipe.lora is None else "adapter"


def render_card(facts: CardFacts, verification: str | None = None, picture: bool = True, folder: str = ".") -> str:
    """Return README.md for what came out of a run; with a `verification` for the model it was merged into.

    `picture` says that loss.png stands beside it, `folder` where the weights are, seen from the card.
    """
    recipe, summary = facts.recipe, facts.summary
    kind: Kind = "merged" if verification is not None else facts.kind
    shown = render_recipe(recipe)
    text = _template().render(
        metadata=render_metadata(facts, kind),
        title=cell(recipe.stem if facts.step is None else f"{recipe.stem}, step {facts.step}"),
        summary=_summary(facts, kind),
        picture=PICTURE if picture else "",
        measured=measured_rows(summary),
        measured_on=measured_on(summary, facts.step),
        loading=render_loading(recipe, summary, kind, folder),
        prompted=prompt_note(summary["template"]),
        asking=render_asking(summary["template"]),
        loading_notes=[*adapter_notes(recipe, kind), *pipeline_note(recipe, summary, kind)],
        verification=verification,
        sources=source_rows(recipe, summary),
        rows=rows_text(summary),
        fingerprint=summary["data_fingerprint"],
        arithmetic=whole_batch(facts.plan),
        plan=plan_rows(facts.plan),
        recipe=shown,
        shown_paths="" if shown == render_recipe(recipe, hide=False) else " (local paths by their last part)",
        fence="`" * max(3, 1 + longest_run(shown)),
        version=__version__,
        receipt=receipt_rows(summary),
        limits=limits_of(recipe, summary, kind),
        licence=_licence_text(facts),
    )
    return hide_tokens(text).rstrip("\n") + "\n"


def render_recipe(recipe: Recipe, hide: bool = True) -> str:
    """Return the recipe as it was run as YAML, without the paths of this machine and without tokens."""
    from ruamel.yaml import YAML

    writer, file = YAML(), StringIO()
    writer.default_flow_style = False
    writer.width = 4096
    resolved = dict(recipe.resolved)
    writer.dump(shown_value(resolved) if hide else resolved, file)
    return file.getvalue().rstrip("\n")


def longest_run(text: str, of: str = "`") -> int:
    """Return how many of a character stand in a row at most."""
    longest = run = 0
    for character in text:
        run = run + 1 if character == of else 0
        longest = max(longest, run)
    return longest


def render_metadata(facts: CardFacts, kind: Kind) -> str:
    """Return the YAML block that the Hub reads. Names that are no Hub ids stay out of it."""
    from huggingface_hub import ModelCardData

    base = facts.summary.get("public_base")
    datasets = [name for name in facts.summary.get("hub_datasets") or () if is_hub_id(name)]
    licence = facts.licence
    fields: dict[str, Any] = {}
    if base and is_hub_id(base):
        fields = {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    if licence is not None:
        ids = list(licence.ids)
        fields |= {"license": ids[0] if len(ids) == 1 else ids}
        fields |= {"license_name": licence.name, "license_link": licence.link}
    data = ModelCardData(
        **fields,
        datasets=datasets or None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["tunebook", *_method_tags(facts.recipe)],
    )
    return data.to_yaml(line_break="\n").rstrip("\n")


def _method_tags(recipe: Recipe) -> list[str]:
    if recipe.lora is None:
        return []
    return ["qlora" if recipe.quantization else "lora", *(["dora"] if recipe.lora.get("use_dora") else [])]


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _summary(facts: CardFacts, kind: Kind) -> str:
    recipe, summary = facts.recipe, facts.summary
    what = {
        "adapter": f"An adapter ({cell(summary['method'])}) for ",
        "merged": f"The merged model of an adapter ({cell(summary['method'])}) and ",
        "model": "A full fine-tune of ",
    }[kind]
    base = summary.get("public_base")
    if base:
        revision = recipe.model.revision if recipe.model.base_id else summary["model_revision"]
        name = f"[{cell(base)}](https://huggingface.co/{base})" if is_hub_id(base) else cell(base)
        named = f"{name}{f', revision {cell(revision)}' if revision else ''}"
    else:
        named = f"a base known by the folder it was loaded from alone, {cell(shown_value(summary['model']))}"
    when = "" if facts.step is None else f" These are the weights after step {facts.step}, not those of the run's end."
    if facts.step is None and recipe.arguments.get("load_best_model_at_end"):
        metric = cell(recipe.arguments.get("metric_for_best_model") or "the held-out loss")
        when = f" These are the weights of the best step, as {metric} tells, not of the last."
    return f"{what}{named}; trained by the recipe {cell(recipe.stem)} below.{when}"


def _licence_text(facts: CardFacts) -> str:
    if facts.licence is None:
        known = "The licence of the base is not known here: look it up before passing this on."
    else:
        named = cell(facts.licence.render() + (f" ({facts.licence.link})" if facts.licence.link else ""))
        known = f"The base is published under {named}; see there what holds for models made from it."
    return f"{known} The data has terms of its own."


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    text = files("tunebook.card").joinpath("templates", "model_card.md.jinja").read_text(encoding="utf-8")
    return Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(text)
