"""What comes out of a run: held-out rows before and after, the adapter, and run_summary.json from start to end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from transformers import TrainerState

from tunebook.card.files import write_run_cards
from tunebook.data.prepare import write_quarantine
from tunebook.errors import Interrupted, TrainingFailed
from tunebook.model.adapter import exported_tensors, tensor_sha256, write_adapter
from tunebook.plan.plan import Plan
from tunebook.runs.checkpoints import list_checkpoints
from tunebook.runs.folder import SUMMARY
from tunebook.system.watchdog import set_last_words
from tunebook.system.writing import explain_unwritten
from tunebook.training.agreement import check_replicas
from tunebook.training.answers import greedy_answers, num_exact_matches
from tunebook.training.collectives import from_rank_0, largest_over_processes, sum_over_processes
from tunebook.training.loss import check_weights_finite
from tunebook.training.measuring import PeakMemory, Stopwatch, TokenCounts
from tunebook.training.ready import ReadyRun
from tunebook.training.reporting import ProgressReport, keep_metrics
from tunebook.training.shown_rows import write_rows
from tunebook.training.stopping import StopVote
from tunebook.training.summary import RunSummary, failed_summary, start_summary, write_summary
from tunebook.training.trackers import build_trackers

ACCURACY = "eval_token_accuracy"


class Training(Protocol):
    """What has trained, or will: the Trainer of finetune.py, or the loop of train_ddp.py."""

    model: Any
    state: TrainerState
    tokens: TokenCounts
    stopwatch: Stopwatch
    vote: StopVote
    last_micro_batch: dict[str, Any] | None

    def held_out_loss(self) -> float | None:
        """Return the held-out loss of the weights as they stand, or None where no rows are held out."""


@dataclass(frozen=True)
class HeldOut:
    """What the model does on held-out rows at one moment; the loss is None where none are held out."""

    loss: float | None
    answers: tuple[str, ...]
    num_exact_matches: int


@dataclass(frozen=True)
class RunResult:
    """What came out of a run: its summary, held-out rows before and after, and notes for the user."""

    run: ReadyRun
    summary: RunSummary
    before: HeldOut
    after: HeldOut
    notes: tuple[str, ...]


class Record:
    """run_summary.json from a run's start to its end, and what shows the run; only rank 0 writes and prints."""

    def __init__(self, run: ReadyRun, after_step: int | None = None) -> None:
        """Write what is known before step 1: the running summary, and the rows that cannot be used.

        Of the metrics of an earlier life the lines up to `after_step` are kept, none where it is None.
        """
        self._run, self._memory = run, PeakMemory(run.world.device)
        self._ending, self._is_noted_for_good = threading.Lock(), False
        started = start_summary(run.recipe, run.plan, run.world, run.data, run.model)
        self.summary = replace(started, went_on_from_step=after_step)
        self.report: ProgressReport | None = None
        self._answers_before: tuple[str, ...] = ()
        with written_for_all(Path(run.plan.run_dir), "Make room and run the same command again", OSError):
            self._write()
            if run.world.is_main:
                self.report = self._begin_report(Path(run.plan.run_dir), after_step)

    def _begin_report(self, folder: Path, after_step: int | None) -> ProgressReport:
        run, metrics = self._run, folder / "metrics.jsonl"
        if run.data.num_bad_rows:
            write_quarantine(run.data, folder / "quarantine.jsonl")
        earlier = keep_metrics(metrics, after_step)
        trackers = build_trackers(run.recipe, folder, earlier)
        return ProgressReport(metrics, earlier=earlier, memory=self._memory, trackers=trackers)

    @contextmanager
    def kept(self, trainer: Training) -> Iterator[None]:
        """Write down how the run ended if it ends with an error inside, after how many steps and seconds."""
        if self._run.world.is_main:
            set_last_words(lambda reason: self._note_failure(trainer, TrainingFailed(reason), for_good=True))
        try:
            yield
        except BaseException as error:
            self._note_failure(trainer, error)
            raise
        finally:
            set_last_words(None)
            self._memory.stop()
            if self.report is not None:
                self.report.close()

    def _note_failure(self, trainer: Training, error: BaseException, for_good: bool = False) -> None:
        """Write why the run ended; once that is noted `for_good`, nothing else is.

        The watchdog's thread knows who hangs; the main thread, whose collective runs out of time in the same moment,
        does not, and may be the last to write.
        """
        with self._ending:
            if self._is_noted_for_good:
                return
            self._is_noted_for_good = for_good
            step = error.step if isinstance(error, Interrupted) else trainer.state.global_step
            wall = self._run.wall.seconds
            self.summary = replace(failed_summary(self.summary, error), num_optimizer_steps=step, wall_seconds=wall)
            with suppress(OSError):  # on a full disk it is the first error that should be seen
                self._write()

    def note_before(self, before: HeldOut) -> None:
        """Note what the model could do before step 1."""
        share = exact_share(before, self._run)
        self.summary = replace(self.summary, eval_loss_before=before.loss, exact_match_before=share)
        self._answers_before = before.answers
        self._write_rows()

    def complete(self, trainer: Training, after: HeldOut) -> tuple[str, ...]:
        """Write the card and the summary of the finished run; every process takes part in its sums.

        Returns rank 0's notes for the user. Raises TrainingFailed on every process when rank 0 cannot write it.
        """
        run = self._run
        notes: tuple[str, ...] = ()
        self.summary = complete_summary(self.summary, run, trainer, self._memory, after)
        self._write_rows(after.answers)
        if run.world.is_main:
            notes = write_run_cards(run.recipe, run.plan, self.summary)
        with written_for_all(Path(run.plan.run_dir) / SUMMARY, _only_summary_lacks(run.plan), OSError):
            self._write()
        return notes

    def _write_rows(self, answers_after: tuple[str, ...] = ()) -> None:
        if self._run.world.is_main:
            with suppress(OSError):  # it is only looked at; a run must not fail for it
                write_rows(Path(self._run.plan.run_dir), self._run.data, self._answers_before, answers_after)

    def _write(self) -> None:
        if self._run.world.is_main:
            write_summary(self.summary, self._run.plan.run_dir)


@contextmanager
def written_for_all(place: Path, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Let rank 0 write inside, while the others wait; where it cannot, raise the same TrainingFailed on every process.

    `errors` are those that say so: torch and safetensors have errors of their own for a full disk.
    """
    problem = None
    try:
        yield
    except errors as error:
        problem = f"{explain_unwritten(error, place)}. {advice}"
    if (problem := from_rank_0(problem)) is not None:
        raise TrainingFailed(problem)


def _only_summary_lacks(plan: Plan) -> str:
    goes_on = list_checkpoints(Path(plan.run_dir) / "checkpoints")
    again = "goes on from the last checkpoint" if goes_on else "trains anew"
    return f"The adapter in {plan.adapter_dir} is whole. Make room and run the same command again, which {again}"


def measure_held_out(trainer: Training, run: ReadyRun) -> HeldOut:
    """Return the held-out loss and the answers to held-out prompts, as the weights stand now."""
    answers = answer_held_out(trainer, run)
    return HeldOut(trainer.held_out_loss(), tuple(answers), num_exact_matches(run.data.examples, answers))


def answer_held_out(trainer: Training, run: ReadyRun) -> list[str]:
    """Return the model's answers to the held-out prompts, on every process."""
    plan, data, vote = run.plan, run.data, trainer.vote
    most = plan.per_device_train_batch_size * plan.max_length
    return greedy_answers(trainer.model, run.tokenizer, data, run.world, plan.compute_dtype, vote, most_positions=most)


def complete_summary(
    summary: RunSummary, run: ReadyRun, trainer: Training, memory: PeakMemory, after: HeldOut
) -> RunSummary:
    """Return the summary of the finished run; every process takes part in its sums."""
    tokens, device = trainer.tokens, run.world.device
    processed, padded, trained = sum_over_processes([tokens.processed, tokens.padded, tokens.trained], device)
    [peak] = largest_over_processes([memory.stop() or 0], device)
    losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    seconds = trainer.stopwatch.seconds
    return replace(
        summary,
        status="completed",
        exit_code=0,
        num_optimizer_steps=trainer.state.global_step,
        processed_tokens=int(processed),
        padded_tokens=int(padded),
        trained_tokens=int(trained),
        first_loss=losses[0] if losses else None,
        final_loss=losses[-1] if losses else None,
        eval_loss=after.loss,
        eval_token_accuracy=next(
            (one[ACCURACY] for one in reversed(trainer.state.log_history) if ACCURACY in one), None
        ),
        exact_match_after=exact_share(after, run),
        num_exact_match_rows=len(run.data.examples),
        tokens_per_second=trained / seconds if seconds else None,
        training_seconds=seconds,
        peak_memory_bytes=int(peak) or None,
        wall_seconds=run.wall.seconds,
        adapter_dir=run.plan.adapter_dir,
        adapter_sha256=tensor_sha256(exported_tensors(trainer.model)),
    )


def exact_share(held_out: HeldOut, run: ReadyRun) -> float | None:
    """Return which part of the held-out prompts was answered word for word; None without prompts."""
    return held_out.num_exact_matches / len(run.data.examples) if run.data.examples else None


def write_adapter_on_main(run: ReadyRun, model: Any) -> tuple[str, ...]:
    """Write the adapter on rank 0, with the others waiting until it is whole; return rank 0's notes for the user.

    What rank 0 writes must be what all ranks trained: a step whose gradient was not reduced on all of them, which DDP
    would only notice in the next one, ends here.
    """
    if not run.world.shards:
        check_replicas(model, run.plan.num_optimizer_steps or 0)
    check_weights_finite(model)
    tensors = exported_tensors(model) if run.world.shards else None
    notes: tuple[str, ...] = ()
    folder, advice = Path(run.plan.adapter_dir), "Make room and run the same command again"
    with written_for_all(folder, advice, OSError, RuntimeError, SafetensorError):
        if run.world.is_main:
            notes = write_adapter(model, run.tokenizer, run.recipe, folder, run.data.stop_token_id, tensors)
    return notes
