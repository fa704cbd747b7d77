"""The whole answer of `--plan`: the arithmetic, and what can be told of data, memory, time and mistakes on the spot.

Nothing is asked of the network and no weights are read. What is not at hand is said to be unknown.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import Problem, Refused
from tunebook.launching.command_line import Command
from tunebook.model.shapes import ModelShape, find_shape
from tunebook.plan.data_report import DataReport, report_data
from tunebook.plan.durations import Duration, Gpu, plan_duration, read_gpu, read_step_seconds, step_seconds_of
from tunebook.plan.findings import (
    Finding,
    as_errors,
    find_data_warnings,
    find_stop_notes,
    find_stop_problems,
)
from tunebook.plan.memory_limit import VARIABLE, read_said
from tunebook.plan.memory_plan import Fullest, MemoryPlan, find_memory_warnings, plan_memory, with_micro_batch
from tunebook.plan.model_findings import find_hub_problems, find_model_findings
from tunebook.plan.plan import Plan, with_split
from tunebook.plan.planned_data import prepare_for_plan
from tunebook.plan.row_view import Segment, view_row
from tunebook.recipe.schema import Recipe
from tunebook.runs.receipts import find_step_seconds
from tunebook.system.places import is_local, is_local_data

if TYPE_CHECKING:
    from tunebook.plan.padding import Padding

NUM_ROWS_SHOWN = 3
TitledRow = tuple[str, tuple[Segment, ...]]


@dataclass(frozen=True)
class DataPart:
    """What the prepared data says: the report, its padding, and rows as they will be trained.

    `fullest` tells the fullest micro-batch of the first epoch for any number of rows per process.
    """

    report: DataReport
    padding: "Padding"
    rows: tuple[TitledRow, ...]
    fullest: Fullest


@dataclass(frozen=True)
class WholePlan:
    """The plan and everything beside it; what is unknown is None, and `unknown` says why, one line each."""

    plan: Plan
    data: DataPart | None
    memory: MemoryPlan | None
    duration: Duration | None
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan's own values, and `data`, `memory`, `time`, `findings` and `unknown` beside them."""
        data = self.data and {
            **self.data.report.as_dict(),
            "padding": self.data.padding.as_dict(),
            "rows": [
                {
                    "row": title,
                    "segments": [
                        {"trained": part.trained, "num_tokens": part.num_tokens, "text": part.text} for part in parts
                    ],
                }
                for title, parts in self.data.rows
            ],
        }
        return {
            **self.plan.as_dict(),
            "data": data,
            "memory": self.memory and self.memory.as_dict(),
            "time": self.duration and self.duration.as_dict(),
            "findings": [vars(finding) for finding in self.findings],
            "unknown": list(self.unknown),
        }

    def refuse_errors(self) -> None:
        """Raise Refused with every finding that is an error."""
        errors = [finding.as_problem() for finding in self.findings if finding.kind == "error"]
        if errors:
            raise Refused(errors)


def complete_plan(recipe: Recipe, plan: Plan, command: Command, refused: Sequence[Problem] = ()) -> WholePlan:
    """Return the whole plan of an accepted recipe, with all that this machine holds of its data and model.

    What is wrong is among the findings, and so is `refused`, which was found before.
    """
    gpu = None if command.gpu is None else read_gpu(command.gpu)
    shape = find_shape(recipe.model.name_or_path, recipe.model.revision)
    unknown, findings, data = find_missing(recipe, command), as_errors(refused), None
    if not unknown:
        unknown += _find_incomplete(recipe)
    if unknown:
        if shape is not None and not is_local(recipe.model.name_or_path):
            findings += as_errors(find_hub_problems(recipe, shape, None))
        plan = _choose(recipe, plan, shape, None, gpu)
    else:
        plan, data = _read_data(recipe, plan, shape, findings, unknown, gpu)
    if gpu and not gpu.bfloat16 and plan.compute_dtype == "bfloat16":
        fix = "Set model.dtype: float16, or float32"
        findings.append(Finding("error", f"--gpu {command.gpu} has no bfloat16", fix, "model.dtype"))
    memory = None
    if shape is None:
        unknown.append(f"memory: the shape of {recipe.model.name_or_path} is not known here")
    else:
        fullest = data.fullest if data else None
        longest = data.report.length_max if data else 0
        memory = plan_memory(recipe, plan, shape, fullest, gpu.memory_gib if gpu else None, longest)
        findings += [
            Finding("warning", message, fix, key) for message, fix, key in find_memory_warnings(memory, recipe, plan)
        ]
    duration = _duration(recipe, plan, command, shape, data, gpu)
    if duration is None:
        unknown.append(f"time: {_missing_for_time(shape, gpu)}")
    return WholePlan(plan, data, memory, duration, tuple(findings), tuple(unknown))


def find_missing(recipe: Recipe, command: Command) -> list[str]:
    """Return why the data cannot be prepared here, one line each; empty where it can. Nothing large is read."""
    unknown = []
    if command.rows is not None:
        unknown.append("data: --rows stands for it")
    else:
        absent = [one.path for one in recipe.data.all_sources() if not is_local_data(one.path)]
        absent = [path for path in absent if not _is_cached_data(path)]
        unknown += [f"data: {path} is on the Hub, and not in the cache of this machine" for path in absent]
    name = recipe.model.name_or_path
    if not is_local(name) and not _is_cached_tokenizer(name, recipe.model.revision):
        unknown.append(f"tokenizer: that of {name} is on the Hub, and not in the cache of this machine")
    return unknown


def _is_cached_tokenizer(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json", revision=revision), str)
    except HFValidationError:
        return False


def _is_cached_data(path: str) -> bool:
    """Whether `datasets` has prepared this data set here: its folders are owner___name, in its own spelling."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    wanted = path.lower().replace("/", "").replace("_", "")
    return cache.is_dir() and any(place.name.lower().replace("_", "") == wanted for place in cache.iterdir())


def _find_incomplete(recipe: Recipe) -> list[str]:
    """Return what the Hub's cache lacks though it has the folder; what is local is not looked at, but read later."""
    from tunebook.data.sources import open_source
    from tunebook.data.tokenizer import load_tokenizer

    unknown, model = [], recipe.model
    is_data_here = all(is_local_data(source.path) for source in recipe.data.all_sources())
    looks: list[tuple[str, bool, Callable[[], Any]]] = [
        ("data", is_data_here, lambda: open_source(recipe.data)),
        ("tokenizer", is_local(model.name_or_path), lambda: load_tokenizer(model.name_or_path, model.revision)),
    ]
    for what, is_here, look in looks:
        try:
            if not is_here:
                look()
        except Refused as refused:
            unknown.append(f"{what}: {refused.problems[0].message}")
    return unknown


def _choose(
    recipe: Recipe, plan: Plan, shape: ModelShape | None, lengths: Sequence[int] | None, gpu: Gpu | None
) -> Plan:
    """Return the plan with what `auto` would be by memory alone, where a GPU is asked about."""
    if gpu is None or not (recipe.chooses_micro_batch or recipe.chooses_checkpointing):
        return plan
    from tunebook.plan.candidates import choose_by_memory

    return choose_by_memory(recipe, plan, shape, lengths, gpu.memory_gib)


def _find_no_fit(
    recipe: Recipe, plan: Plan, shape: ModelShape | None, lengths: Sequence[int], gpu: Gpu | None
) -> list[Problem]:
    """Return what a run refuses where TUNEBOOK_MEMORY_GIB allows less than the smallest setting of `auto` needs."""
    limit = read_said() if gpu is None else None
    if limit is None or shape is None or not (recipe.chooses_micro_batch or recipe.chooses_checkpointing):
        return []
    from tunebook.plan.candidates import explain_no_fit, find_candidates, keep_fitting

    found = find_candidates(recipe, plan, shape, lengths)
    return [] if keep_fitting(found, limit) else [explain_no_fit(found, limit, f"allowed by {VARIABLE}")]


def _read_data(  # noqa: PLR0913, PLR0917 - two of them are filled
    recipe: Recipe, plan: Plan, shape: ModelShape | None, findings: list[Finding], unknown: list[str], gpu: Gpu | None
) -> tuple[Plan, DataPart | None]:
    """Prepare the data, or find it prepared; return the plan for its rows, and add to `findings` and `unknown`."""
    from tunebook.data.tokenizer import tokenizer_of
    from tunebook.plan.padding import measure_padding
    from tunebook.plan.schedule import find_schedule_problems

    try:
        tokenizer = tokenizer_of(recipe)
        prepared, refused_for = prepare_for_plan(recipe, tokenizer)
    except Refused as refused:
        prepared, refused_for = None, list(refused.problems)
    findings += as_errors(refused_for)
    if prepared is None:
        unknown.append("data: it cannot be used as it is")
        return plan, None
    origins = {"num_train_rows": "prepared data", "num_eval_rows": "prepared data"}
    plan = with_split(plan, prepared.num_train_rows, prepared.num_eval_rows, origins)
    plan = replace(plan, notes=(*plan.notes, *prepared.notes))
    lengths = prepared.train.data.column("length").to_pylist()
    findings += as_errors([*find_schedule_problems(recipe, plan), *_find_no_fit(recipe, plan, shape, lengths, gpu)])
    plan = _choose(recipe, plan, shape, lengths, gpu)
    padding = measure_padding(recipe, plan, lengths)
    report = report_data(prepared)
    if not refused_for:
        findings += as_errors(find_stop_problems(recipe, tokenizer, prepared))
    found, unsure = find_model_findings(recipe, plan, shape, tokenizer, prepared.longest_row)
    findings += found
    unknown += unsure
    findings += find_stop_notes(recipe, tokenizer, prepared.stop_token_id)
    num_kept = report.num_train_rows + report.num_eval_rows
    findings += find_data_warnings(recipe.data, num_kept, report.num_equal_rows, padding.share)

    def fullest(rows: int) -> tuple[int, int]:
        if rows == plan.per_device_train_batch_size:
            return padding.fullest
        return measure_padding(recipe, with_micro_batch(recipe, plan, rows), lengths).fullest

    return plan, DataPart(report, padding, _first_rows(prepared, tokenizer, recipe.data_seed), fullest)


def _first_rows(prepared: Any, tokenizer: Any, seed: int) -> tuple[TitledRow, ...]:
    """Return the first rows of step 1, in the order in which the run takes them."""
    from tunebook.training.batches import epoch_order

    order = epoch_order(prepared.num_train_rows, seed, 0)[:NUM_ROWS_SHOWN]
    rows = [prepared.train[row] for row in order]
    return tuple(
        (f"training row {number + 1:,}", view_row(row["input_ids"], row["labels"], tokenizer))
        for number, row in zip(order, rows, strict=True)
    )


def _duration(  # noqa: PLR0913, PLR0917 - each is a source of the number
    recipe: Recipe, plan: Plan, command: Command, shape: ModelShape | None, data: DataPart | None, gpu: Gpu | None
) -> Duration | None:
    if command.step_seconds is not None:
        return plan_duration(plan, command.step_seconds, "--step-seconds")
    from tunebook.training.summary import recipe_sha256

    measured = read_step_seconds(plan.run_dir, recipe_sha256(recipe), plan)
    if measured is not None:
        return plan_duration(plan, measured, f"measured by the run in {plan.run_dir}")
    if receipt := find_step_seconds(recipe, plan, command.gpu if gpu and gpu.tflops else None):
        return plan_duration(plan, *receipt)
    if shape is None or gpu is None:
        return None
    source = "the GPU's rate, 40 % of it used: an estimate"
    if data is None:
        tokens, length = float(plan.global_batch_size * plan.max_length), float(plan.max_length)
        source += " for rows that are all as long as data.max_length, so an upper bound: their lengths are not known"
    else:
        tokens, length = data.padding.tokens_per_step, data.padding.tokens_per_step / plan.global_batch_size
    seconds = step_seconds_of(shape, plan, tokens, length, gpu)
    return None if seconds is None else plan_duration(plan, seconds, source)


def _missing_for_time(shape: ModelShape | None, gpu: Gpu | None) -> str:
    """Return what would tell the time of a step, or what is missing where a GPU was given."""
    others = "--step-seconds S, a finished run in the run folder or `tunebook bench` tells it"
    if gpu is None:
        return f"--gpu NAME, {others}"
    if gpu.tflops is None:
        return f"--gpu with a name in place of GiB, {others}"
    return f"--gpu tells nothing where the shape of the model is not known; {others}" if shape is None else others
