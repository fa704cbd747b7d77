"""What a run learned, measured on held-out rows or on others: the model before and after, side by side.

Loss and perplexity are over every label that training would count; exact match and ROUGE-L compare greedy answers with
the right ones. On several processes each measures its share of the rows, and the figures are the same.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tunebook.errors import EXIT_FAILED, PEER_ENDED, Problem, Refused, is_peer_gone
from tunebook.export.finished import Finished, open_finished
from tunebook.export.past_base import check_base, check_tokenizer, lost_data
from tunebook.launching.process_group import process_group, refuse_together
from tunebook.launching.refusal import exit_refused
from tunebook.launching.world import World, count_gpus, read_world, world_of
from tunebook.recipe.reading import placed_in
from tunebook.recipe.schema import DataSection, Recipe
from tunebook.system.out_files import check_out, write_out
from tunebook.system.places import local_path
from tunebook.using.figures import Figures, Measured, show_figures
from tunebook.using.scores import check_scorer, mean_rouge_l
from tunebook.using.trained import Trained, before_training, load_trained

if TYPE_CHECKING:
    from tunebook.data.prepare import HeldOutExample, PreparedData


HELD_OUT = "its held-out rows"
# What can be done about other rows, where a recipe's author would have more choice.
FIXES_OF_ROWS = {
    "data.max_bad_fraction": "Mend the rows, or take them out",
    "data.max_length": "Shorten the rows, or take them out",
    "data.max_truncated_fraction": "Shorten the rows, or take them out",
    "data.template": "Name rows that the run's template shows",
    "data.validation": "Name a file with rows",
}
MOST_NATS = 700  # whose exp is still a number


@dataclass(frozen=True)
class Evaluation:
    """What is measured: `data` names other rows than the run held out, of which `answer_rows` (None: all) are answered.

    `before` measures the base, too. An answer has `max_new_tokens` at most. `base` is where the base lies now.
    """

    data: str | None = None
    before: bool = True
    out: str | None = None
    answer_rows: int | None = None
    max_new_tokens: int = 256
    base: str | None = None


@dataclass(frozen=True)
class Rows:
    """Prepared rows to measure on, and those of them that are answered."""

    prepared: Any
    data: "PreparedData"
    num_truncated: int


def evaluate(run_dir: str, wanted: Evaluation, world: World) -> Measured | None:
    """Measure a finished run on one of the processes of `world`; return the figures on rank 0, and None elsewhere.

    Raises Refused before weights load where the run, the rows or `out` can't be used.
    """
    finished = open_finished(run_dir, wanted.base)
    check_base(finished)
    if wanted.answer_rows != 0:
        check_scorer()
    if wanted.out is not None:
        check_out(wanted.out, finished.folder, [wanted.data] if wanted.data else [])
    rows = find_rows(finished, wanted)
    with process_group(world, finished.recipe.ddp_timeout):
        measured = _measure(finished, rows, wanted, world)
    return measured if world.is_main else None


def measure_here(run_dir: str, wanted: Evaluation) -> None:
    """Measure a finished run on this process alone, and print the figures."""
    world = world_of(1, "cuda" if count_gpus() else "cpu")
    measured = evaluate(run_dir, wanted, world)
    _give_out(measured, wanted)


def measure_as_rank(run_dir: str, wanted: Evaluation) -> None:
    """Measure a finished run as one process of a launch; rank 0 prints the figures. A refusal is said once for all."""
    try:
        _give_out(evaluate(run_dir, wanted, read_world()), wanted)
    except Refused as refused:
        exit_refused(refused)
    except RuntimeError as error:
        if not is_peer_gone(error):
            raise
        print(f"failed: {PEER_ENDED}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _give_out(measured: Measured | None, wanted: Evaluation) -> None:
    """Print the figures on the process that has them, then write them where that is wanted."""
    if measured is not None:
        show_figures(measured)
        if wanted.out is not None:
            write_out(local_path(wanted.out), json.dumps(asdict(measured), indent=2) + "\n")


def find_rows(finished: Finished, wanted: Evaluation) -> Rows:
    """Return the rows to measure on, labelled as in training. Raises Refused where there are none, or not the run's."""
    from tunebook.data.chat_prompts import build_prompts
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of

    recipe = finished.recipe
    tokenizer = tokenizer_of(recipe)
    if wanted.data is None:
        if lost := lost_data(finished):
            message = f"{lost[0]} was a place of rows on this machine, and is none here"
            raise Refused(Problem(message, "Name rows: --data FILE", str(finished.folder)))
        with placed_in(recipe):
            data = prepare_data(recipe, tokenizer)
            template = build_prompts(tokenizer, recipe.data.template).source
        check_same_rows(finished, data, template)
        prepared = data.evaluation
    else:
        data = _prepare_other(recipe, wanted.data, tokenizer)
        prepared = data.train
    check_tokenizer(finished, tokenizer)
    examples = find_examples(prepared, tokenizer, data.stop_token_id, wanted.answer_rows)
    # An answer that is there and does not end with the token that ends it was cut.
    cut = sum(row["prompt_length"] > 0 and row["input_ids"][-1] != data.stop_token_id for row in prepared)
    return Rows(prepared, replace(data, examples=examples), cut)


def check_same_rows(finished: Finished, data: "PreparedData", template: str) -> None:
    """Raise Refused where the run held no rows out, or where its data has changed: some might have been trained.

    Under a template that writes the date the fingerprint changes by the day, and tells nothing of the rows.
    """
    other = "Name rows: --data FILE"
    if data.evaluation is None:
        raise Refused(Problem("the run held no rows out (data.validation)", other, str(finished.folder)))
    if data.data_fingerprint != finished.summary.get("data_fingerprint") and "strftime_now" not in template:
        message = "the data is not what the run was trained on, so which rows it held out is not known"
        raise Refused(Problem(message, other, str(finished.folder)))


def _prepare_other(recipe: Recipe, path: str, tokenizer: Any) -> "PreparedData":
    """Return all rows of another place, read as the recipe reads its own, or by their own columns."""
    from tunebook.data.prepare import prepare_data

    if not path.strip():
        raise Refused(Problem("is empty", "Name a file", "--data"))
    kept = recipe.data.model_dump(include={"template", "train_on", "max_length", "on_overflow", "max_bad_fraction"})
    ways: list[dict[str, Any]] = [{"format": one.format, "columns": one.columns} for one in recipe.data.all_sources()]
    refused = None
    for way in [*ways, {"format": "auto", "columns": None}]:
        try:
            data = DataSection(**kept, **way, path=path, answer_rows=0)
            return prepare_data(replace(recipe, data=data), tokenizer)
        except Refused as error:
            refused = refused or error
    assert refused is not None
    with placed_in(recipe):
        raise Refused([_of_option(problem) for problem in refused.problems]) from refused


def _of_option(problem: Problem) -> Problem:
    """Name the option where a problem names the recipe's key: the recipe of a finished run stays as it is."""
    if not problem.key.startswith("data."):
        return problem
    section = ".".join(problem.key.split(".")[:2])
    fix = FIXES_OF_ROWS.get(section, problem.fix)
    return replace(problem, key="", where=problem.where or "--data", fix=fix)


def find_examples(prepared: Any, tokenizer: Any, stop_token_id: int, most: int | None) -> tuple["HeldOutExample", ...]:
    """Return the last prompt of each row with its right answer, for `most` rows (None: all).

    Rows without one, and rows whose answer was cut at data.max_length, are left out.
    """
    from tunebook.data.prepare import HeldOutExample

    found: list[HeldOutExample] = []
    for row in prepared:
        if most is not None and len(found) >= most:
            break
        ids, border = row["input_ids"], row["prompt_length"]
        if border and ids[-1] == stop_token_id:
            found.append(HeldOutExample("", tuple(ids[:border]), tokenizer.decode(ids[border:-1])))
    return tuple(found)


def _measure(finished: Finished, rows: Rows, wanted: Evaluation, world: World) -> Measured:
    with refuse_together():
        trained = load_trained(finished, world)
    after, num_labels = _figures(trained.model, trained, finished, rows, wanted, world)
    before = None
    if wanted.before:
        if finished.recipe.lora is None:
            trained = replace(trained, model=None)  # one whole model at a time
        with before_training(trained, finished, world) as base:
            before, _ = _figures(base, trained, finished, rows, wanted, world)
    return Measured(
        run=str(finished.folder if finished.checkpoint is None else finished.checkpoint.folder),
        data=wanted.data or HELD_OUT,
        data_fingerprint=rows.data.data_fingerprint,
        num_rows=len(rows.prepared),
        num_labels=num_labels,
        num_answered=len(rows.data.examples),
        num_truncated_rows=rows.num_truncated,
        num_dropped_rows=rows.data.num_dropped_rows if wanted.data else 0,
        num_bad_rows=rows.data.num_bad_rows if wanted.data else 0,
        before=before,
        after=after,
    )


def _figures(  # noqa: PLR0913, PLR0917 - a model of a run, on rows, as wanted, in a world
    model: Any, trained: Trained, finished: Finished, rows: Rows, wanted: Evaluation, world: World
) -> tuple[Figures, int]:
    from tunebook.training.answers import greedy_answers, num_exact_matches

    loss, num_labels = token_loss(model, finished, rows.prepared, world)
    examples = rows.data.examples
    exact = rouge = None
    if examples:
        dtype, most = finished.plan.compute_dtype, wanted.max_new_tokens
        answers = greedy_answers(model, trained.tokenizer, rows.data, world, dtype, most_tokens=most)
        exact = num_exact_matches(examples, answers) / len(examples)
        rouge = mean_rouge_l([example.answer for example in examples], answers)
    is_number = math.isfinite(loss)  # else the model is broken, and JSON has no word for it
    perplexity = math.exp(loss) if is_number and loss < MOST_NATS else None
    return Figures(loss if is_number else None, perplexity, exact, rouge), num_labels


def token_loss(model: Any, finished: Finished, prepared: Any, world: World) -> tuple[float, int]:
    """Return the loss over all labels of all rows, as the run's `eval_loss`, and the number of those labels."""
    import torch

    from tunebook.training.batches import Rows as Numbered
    from tunebook.training.batches import eval_batches, join_rows, pad_right, tensors_of
    from tunebook.training.collectives import sum_over_processes
    from tunebook.training.decoding import answering
    from tunebook.training.head_loss import HeadLoss

    recipe = finished.recipe
    collate = join_rows if recipe.data.packing else pad_right
    size = int(recipe.arguments.get("per_device_eval_batch_size", finished.plan.per_device_train_batch_size))
    numbered, total, num_labels = Numbered(prepared), 0.0, 0
    compute_dtype = finished.plan.compute_dtype
    with answering(model, getattr(torch, compute_dtype)) as bare_model:
        head_loss = HeadLoss(bare_model, compute_dtype, recipe.batch.fused_loss == "auto")
        for places in eval_batches(len(numbered), size, world.num_processes, world.rank):
            batch = collate(numbered.__getitems__(places))
            num_labels += batch["num_trained_tokens"]
            targets = tensors_of(batch["targets"], world.device)
            total += float(head_loss.sums(bare_model, tensors_of(batch, world.device), targets).loss)
    loss, of_all = sum_over_processes([total, num_labels], world.device)
    return loss / max(of_all, 1), int(of_all)


def as_words(run: str, wanted: Evaluation) -> Sequence[str]:
    """Return the words that ask for this evaluation after `tunebook eval`, for each process of a launch."""
    words = [run, *(() if wanted.before else ("--no-before",))]
    for name, value in (
        ("--data", wanted.data),
        ("--out", wanted.out),
        ("--answer-rows", wanted.answer_rows),
        ("--base", wanted.base),
    ):
        words += [] if value is None else [name, str(value)]
    return [*words, "--max-new-tokens", str(wanted.max_new_tokens)]
