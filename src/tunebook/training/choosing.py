"""`auto`: micro-batch and activation checkpointing chosen by memory and by a measurement, the same on all ranks.

A run that goes on in its folder keeps what was chosen for it, as long as recipe, number of processes, hardware and
TUNEBOOK_MEMORY_GIB are the same: what else a machine does meanwhile does not count.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from tunebook.data.prepare import PreparedData
from tunebook.errors import Refused
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.model.attention import find_position_problems
from tunebook.model.shapes import find_shape
from tunebook.plan.candidates import Candidate, explain_no_fit, find_candidates, keep_fitting, say_origin
from tunebook.plan.memory import CUDA_CONTEXT_BYTES, GIB
from tunebook.plan.memory_limit import VARIABLE, find_limit, name_limit
from tunebook.plan.memory_plan import TIGHT
from tunebook.plan.optimizers import find_optimizer_bytes
from tunebook.plan.plan import Plan
from tunebook.plan.storage import FLOAT32
from tunebook.plan.table import build_console
from tunebook.recipe.schema import Recipe
from tunebook.system.hardware import name_hardware
from tunebook.training.collectives import from_rank_0, largest_over_processes
from tunebook.training.probing import Bench, Probe, probe
from tunebook.training.summary import recipe_sha256


@dataclass(frozen=True)
class Options:
    """What a recipe leaves open: the candidates that fit, most promising first, and those that don't.

    `plan` has numbers to begin with; without candidates they are those of the run.
    """

    plan: Plan
    candidates: tuple[Candidate, ...] = ()
    too_large: tuple[Candidate, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A candidate as all ranks measured it: trained tokens a second (None: not measured), and why not."""

    candidate: Candidate
    tokens_per_second: float | None
    why_not: str = ""


def open_options(recipe: Recipe, plan: Plan, world: World, data: PreparedData, goes_on: bool) -> Options:
    """Return what there is to choose from, the same on every rank; nothing where the recipe leaves nothing open.

    `goes_on` says that the run in the folder is gone on with. Every rank raises the same Refused where nothing fits.
    """
    if not (recipe.chooses_micro_batch or recipe.chooses_checkpointing):
        return Options(plan)
    made_for = _made_for(recipe, plan)
    earlier, why_not = from_rank_0(_read_earlier(plan, made_for) if world.is_main and goes_on else (None, ""))
    if why_not and world.is_main:
        build_console().print(f"auto: chosen anew: {why_not}", soft_wrap=True, markup=False)
    if earlier is not None:
        return Options(_take_up(earlier, recipe, plan, world))
    with refuse_together():
        limit = find_limit(world)
    limit = int(-largest_over_processes([-limit], world.device)[0])
    # Rank 0's answer for all: the Hub's cache of another machine may lack the config, and its ranks other candidates.
    shape = from_rank_0(find_shape(recipe.model.name_or_path, recipe.model.revision) if world.is_main else None)
    careful = "the model is sharded, and is not measured so" if world.shards else ""
    if shape is None and world.device_type == "cpu":
        careful = f"the shape of {plan.model} is not known here, and with it what fits"
    if careful:
        settled = _settle(recipe, plan, f"auto: {careful}", {"made_for": made_for, "reason": careful})
        _say(settled, world)
        return Options(settled)
    with refuse_together():
        found = find_candidates(recipe, plan, shape, list(data.train["length"]))
        fitting = keep_fitting(found, limit)
        if not fitting:
            raise Refused(explain_no_fit(found, limit, name_limit(world, limit)))
    too_large = tuple(one for one in found if one not in fitting)
    return Options(plan, tuple(fitting), too_large, limit)


def choose(  # noqa: PLR0913, PLR0917 - each is a part of what is chosen for
    options: Options, recipe: Recipe, world: World, data: PreparedData, bench: Bench, arguments: TrainingArguments
) -> Plan:
    """Return the plan with the fastest candidate, as all ranks together measured it; rank 0 says which and why."""
    plan, limit = options.plan, options.limit
    assert limit is not None, "candidates were held against a limit"
    able = [
        one
        for one in options.candidates
        if not find_position_problems(recipe, bench.model.config, data.longest_row, one.micro_batch)
    ]
    assert able, "check_positions has refused what the smallest micro-batch cannot do"
    is_measured = len(able) > 1 and not arguments.torch_compile
    probes = probe(able, bench, arguments.activation_checkpointing_kwargs) if is_measured else [Probe()] * len(able)
    outcomes = _agree(able, probes, plan, world, data, _state_bytes(bench.model, plan), limit)
    measured = [one for one in outcomes if one.tokens_per_second is not None]
    if measured:
        best = max(measured, key=lambda one: one.tokens_per_second or 0).candidate
    elif is_measured:  # none had memory enough
        best = min(able, key=lambda one: (one.needed or 0, one.micro_batch, -one.checkpointing))
    else:
        best = able[0]
    reason = _explain(best, outcomes, arguments.torch_compile)
    reason += f"; {limit / GIB:.2f} GiB are {name_limit(world, limit)}"
    record = {
        "made_for": _made_for(recipe, plan),
        "reason": reason,
        "limit_bytes": limit,
        "candidates": [_as_dict(one) for one in outcomes]
        + [_as_dict(Outcome(one, None, "does not fit")) for one in options.too_large],
    }
    origin = f"auto: the fastest of {len(measured)} measured" if len(measured) > 1 else "auto: what fits"
    chosen = _settle(recipe, best.planned(recipe, plan), origin, record)
    _say(chosen, world)
    return chosen


def _agree(  # noqa: PLR0913, PLR0917 - each is a part of what is compared
    candidates: Sequence[Candidate],
    probes: Sequence[Probe],
    plan: Plan,
    world: World,
    data: PreparedData,
    state_bytes: int,
    limit: int,
) -> list[Outcome]:
    """Bring the probes of all ranks together: the slowest rank is waited for, and what one has no memory for, none has.

    On a GPU the optimizer's states and DDP's buckets, which a probe lacks, are added to what it measured.
    """
    parts = [(one.seconds, one.ran_out, not one.seconds, one.peak_bytes) for one in probes]
    agreed = largest_over_processes([float(value) for part in parts for value in part], world.device)
    trained = data.trained_tokens / (plan.steps_per_epoch or 1)
    outcomes = []
    for place, candidate in enumerate(candidates):
        seconds, ran_out, untried, peak = agreed[4 * place : 4 * place + 4]
        if ran_out:
            outcomes.append(Outcome(candidate, None, "out of memory"))
        elif untried:
            outcomes.append(Outcome(candidate, None, "not measured"))
        elif peak and peak + state_bytes > TIGHT * limit:
            outcomes.append(Outcome(candidate, None, "too little memory left for the optimizer"))
        else:
            assert candidate.layout is not None, "the rows of a run are known"
            steps = plan.global_batch_size / (plan.world_size * candidate.micro_batch)
            step_seconds = steps * seconds / candidate.layout.usual_share
            outcomes.append(Outcome(candidate, trained / step_seconds))
    return outcomes


def _state_bytes(model: Any, plan: Plan) -> int:
    """Return what training holds on a GPU beside what a probe allocates: optimizer states, DDP's copies, context.

    Not what the optimizer computes with: activations are gone by then, and the plan has held that moment against the
    limit.
    """
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    states = find_optimizer_bytes(plan.optim, True, []).states
    return CUDA_CONTEXT_BYTES + int(trained * (states + (FLOAT32 if plan.world_size > 1 else 0)))


def _explain(best: Candidate, outcomes: Sequence[Outcome], is_compiled: bool | None) -> str:
    measured = sorted((one for one in outcomes if one.tokens_per_second), key=lambda one: -(one.tokens_per_second or 0))
    if not measured:
        if is_compiled:
            return f"{best.name}: by memory alone, since the model is compiled"
        if len(outcomes) == 1:
            return f"{best.name}: the only one that fits"
        counted = Counter(one.why_not for one in outcomes)
        return f"{best.name}: it needs the least; {', '.join(f'{count} {why}' for why, count in counted.items())}"
    fastest = f"{measured[0].tokens_per_second:,.0f} trained tokens/s"
    if len(measured) == 1:
        return f"{best.name}: {fastest}, the only one measured"
    next_one = f"next {measured[1].candidate.name}: {measured[1].tokens_per_second:,.0f}"
    return f"{best.name}: {fastest}, the fastest of {len(measured)} measured ({next_one})"


def _settle(recipe: Recipe, plan: Plan, origin: str, record: dict[str, Any]) -> Plan:
    chosen = {
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "activation_checkpointing": plan.activation_checkpointing,
    }
    return replace(say_origin(plan, recipe, origin), choice={**chosen, **record})


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": outcome.candidate.micro_batch,
        "activation_checkpointing": outcome.candidate.checkpointing,
        "planned_bytes": outcome.candidate.needed,
        "tokens_per_second": outcome.tokens_per_second,
        "why_not": outcome.why_not,
    }


def _made_for(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return what a choice holds for."""
    return {
        "recipe": recipe_sha256(recipe),
        "processes": plan.world_size,
        "hardware": name_hardware(plan.device_type),
        VARIABLE: os.environ.get(VARIABLE, "").strip(),
    }


def _read_earlier(plan: Plan, made_for: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the choice that the run in the folder began with, or None and why it does not hold here and now."""
    place = Path(plan.run_dir) / "plan.json"
    try:
        choice = json.loads(place.read_text(encoding="utf-8"))["choice"]
        rows, checkpointing = choice["per_device_train_batch_size"], choice["activation_checkpointing"]
        before = dict(choice["made_for"])
    except FileNotFoundError:  # broken off before it was written
        return None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, f"{place} has none that can be read"
    is_whole = type(rows) is int and rows > 0 and type(checkpointing) is bool
    if not is_whole or plan.global_batch_size % (plan.world_size * rows):
        return None, f"that of {place} does not divide the global batch"
    if changed := [name for name in made_for if before.get(name) != made_for[name]]:
        return None, f"that of {place} was made for another value of {' and '.join(changed)}"
    return dict(choice), ""


def _take_up(choice: dict[str, Any], recipe: Recipe, plan: Plan, world: World) -> Plan:
    """Return the plan with an earlier choice, and say so on rank 0."""
    rows, checkpointing = choice["per_device_train_batch_size"], choice["activation_checkpointing"]
    kept = Candidate(rows, checkpointing, None, 0.0)
    if world.is_main:
        text = f"auto: {kept.name}, as the run in {plan.run_dir} began"
        build_console().print(text, soft_wrap=True, markup=False)
    return replace(say_origin(kept.planned(recipe, plan), recipe, "auto: as the run began"), choice=choice)


def _say(plan: Plan, world: World) -> None:
    if world.is_main and plan.choice is not None:
        build_console().print(f"auto: {plan.choice['reason']}", soft_wrap=True, markup=False)
