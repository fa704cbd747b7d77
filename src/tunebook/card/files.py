"""The card and its picture as files, beside what came out of a run and in the run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunebook.card.card import PICTURE, CardFacts, render_card
from tunebook.card.licence import find_licence
from tunebook.card.loss_picture import draw_losses, read_metrics
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.system.writing import write_whole

CARD = "README.md"


def write_card(
    folder: Path, facts: CardFacts, events: Sequence[Mapping[str, Any]], verification: str | None = None
) -> tuple[str, ...]:
    """Write README.md and, where a loss was logged, loss.png into the folder of what came out.

    Returns a note where the picture could not be drawn, which loses nothing else.
    """
    picture, notes = _draw(events)
    _write(folder, facts, picture, ".", verification)
    return notes


def write_run_cards(recipe: Recipe, plan: Plan, summary: Any) -> tuple[str, ...]:
    """Write card and picture of a run that ends into its adapter folder and its run folder; rank 0 alone.

    `summary` is the RunSummary. What cannot be written is a note: the adapter is there, and `tunebook export` makes
    them again.
    """
    run_dir, adapter, written = Path(plan.run_dir), Path(plan.adapter_dir), asdict(summary)
    try:
        facts = CardFacts(recipe, plan.as_dict(), written, find_licence(recipe, written["model_revision"]))
        picture, notes = _draw(read_metrics(run_dir))
        _write(adapter, facts, picture, ".")
        _write(run_dir, facts, picture, adapter.name)
    except Exception as error:  # a full disk, or a fault of our own: in no case is it worth a trained adapter
        return (f"the card could not be written ({_reason(error)}); tunebook export {run_dir} makes another",)
    return notes


def _draw(events: Sequence[Mapping[str, Any]]) -> tuple[bytes | None, tuple[str, ...]]:
    try:
        return draw_losses(events), ()
    except Exception as error:  # Pillow absent or broken: the card is worth having without it
        return None, (f"the loss picture could not be drawn ({_reason(error)}); the card is without it",)


def _write(
    folder: Path, facts: CardFacts, picture: bytes | None, weights: str, verification: str | None = None
) -> None:
    if picture is not None:
        write_whole(folder / PICTURE, picture)
    write_whole(folder / CARD, render_card(facts, verification, picture is not None, weights))


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
