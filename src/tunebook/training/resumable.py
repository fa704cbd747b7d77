"""transformers' Trainer, made to be broken off at any instant and gone on with as if it had not been."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.errors import TrainingFailed
from tunebook.runs.checkpoints import Checkpoint, NotWhole, check_best, checkpoint_folder
from tunebook.system.quiet import quiet_libraries
from tunebook.system.whereabouts import arrive, begin_step
from tunebook.training.batches import FILLER, tensors_of
from tunebook.training.collectives import sum_over_processes
from tunebook.training.measuring import Stopwatch, TokenCounts
from tunebook.training.saving import Progress, random_states, restore_random_states, save_checkpoint, sum_tokens
from tunebook.training.stopping import StopVote


@dataclass(frozen=True)
class OpenWindow:
    """What the micro-batches of an unfinished step change, as it was before the first of them."""

    tokens: TokenCounts
    loss_sum: Any
    random_states: dict[str, Any]


class ResumableTrainer(Trainer):  # type: ignore[misc]
    """Saves checkpoints that are whole or absent, goes on from them exactly, and stops where all processes agree.

    `num_kept` is the recipe's save_total_limit; rotation is done here, since Trainer's goes by the clock and deletes
    the only whole checkpoint after a broken-off save.
    """

    def __init__(
        self, args: TrainingArguments, callbacks: list[TrainerCallback], wall: Stopwatch, **kwargs: Any
    ) -> None:
        self.tokens = TokenCounts()
        self.stopwatch = Stopwatch()
        self.wall = wall
        self.vote = StopVote(args.ddp_timeout)
        self.earlier: Progress | None = None
        self.before: dict[str, Any] = {}
        self.saved_step = 0
        self.num_kept, args.save_total_limit = args.save_total_limit, None
        self._window: OpenWindow | None = None
        self._num_micro_steps = 0
        self._evaluation_due = False
        self._states_at_step_end: dict[str, Any] = {}
        super().__init__(args=args, callbacks=[Continuity(self), *callbacks], **kwargs)

    def train_on(self, checkpoint: Checkpoint | None) -> None:
        """Train to the end, from the start or from a checkpoint as if the run had never been broken off.

        Raises StopAgreed on all processes when one was asked to stop; `save_where_it_stands` may follow.
        """
        self.model.train()  # all of it: from_pretrained leaves a base that an adapter is put on in evaluation mode
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))

    def go_on_from(self, checkpoint: Checkpoint) -> Progress:
        """Take over the counts and the clock of a checkpoint, before anything is measured; rank 0 counts for all."""
        self.earlier = Progress(**checkpoint.read_progress())
        if self.args.process_index == 0:
            self.tokens = TokenCounts(**self.earlier.tokens)
        self.stopwatch.add(self.earlier.training_seconds)
        self.wall.add(self.earlier.wall_seconds)
        self.before = self.earlier.before
        self.saved_step = checkpoint.step
        # Trainer reads it again when training begins; what ends the run before that should say where it stood.
        self.state.global_step = checkpoint.step
        return self.earlier

    @property
    def checkpoints(self) -> Path:
        """The folder that the checkpoints are in."""
        return Path(self.args.output_dir)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Open the window of a step: note what its micro-batches change, should it have to be dropped."""
        tokens = replace(self.tokens)
        self._window = OpenWindow(tokens, self._tr_loss.clone(), self._states_at_step_end)
        self._num_micro_steps = 0
        begin_step(self.state.global_step + 1)
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Return the labels of the step over all processes, as a tensor that nobody has to wait for.

        Each micro-batch brings their number along; Trainer counts them anew on the device.
        """
        arrive("the count of the step's labels")
        here = torch.tensor(sum(one["num_trained_tokens"] for one in batch_samples))
        return self.accelerator.gather(here.to(device, non_blocking=True)).sum()

    def meet_in_backward(self) -> None:
        """Note where this process goes next, if the backward pass of this micro-batch is collective."""
        if self.accelerator.sync_gradients:
            arrive("the backward pass")

    def close_window(self) -> None:
        """Note that the step is done; called at its end."""
        self._window, self._states_at_step_end = None, random_states()

    def check_stop(self) -> None:
        """Raise StopAgreed on all processes when any of them was asked to stop; called before each micro-batch.

        All vote before the last micro-batch of a step, the only one whose backward pass is collective. Who knows of a
        wish to stop goes to that vote at once, so it never waits for a whole window, and no other micro-batch costs
        anything. The first one is run in any case: DDP may arrange its buckets, collectively, in its forward pass.
        """
        is_last = self.accelerator.sync_gradients
        # Every forward pass of a sharded model is a meeting, which nobody may leave for the vote.
        may_leave = self._num_micro_steps > 0 and not self.is_fsdp_enabled
        if is_last or (may_leave and self.vote.is_asked):
            self.vote.agree()
        self._num_micro_steps += 1

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does, off the clock that measures training; one that is broken off stays due."""
        self._evaluation_due = True
        with self.stopwatch.paused():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        self._evaluation_due = False
        return metrics

    def save_where_it_stands(self) -> int:
        """Save a checkpoint after the last whole step, dropping an unfinished one; return the step it was saved after.

        0 where no step was done, or the model is sharded. After the best model was loaded at the end there is nothing
        to save but what is.
        """
        if self.is_fsdp_enabled:
            return 0
        is_over = not self.is_in_train and self.args.load_best_model_at_end
        is_due = self._evaluation_due and self.is_in_train
        if is_over or (self.state.global_step == self.saved_step and not is_due):
            return self.saved_step
        states = random_states()
        if self._window is not None:
            self.tokens, self._tr_loss = self._window.tokens, self._window.loss_sum
            states, self._window = self._window.random_states, None
        if self.state.global_step:
            self._save_all(states)
        return self.saved_step

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save whole or not at all; Trainer's own way writes file by file where they will be looked for."""
        self._save_all(random_states())

    def _save_all(self, states: dict[str, Any]) -> None:
        step = self.state.global_step
        if self.state.best_global_step is not None:
            best = checkpoint_folder(self.checkpoints, self.state.best_global_step)
            if self.state.best_global_step == step or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        with self.stopwatch.paused():
            [loss_sum] = sum_over_processes([self._tr_loss.item() / self.args.world_size], self.args.device)
            progress = Progress(
                step=step,
                max_steps=self.state.max_steps,
                tokens=sum_tokens(self.tokens, self.args.device),
                training_seconds=self.stopwatch.seconds,
                wall_seconds=self.wall.seconds,
                loss_sum=loss_sum,
                last_logged=self._globalstep_last_logged,
                evaluation_due=self._evaluation_due and self.is_in_train,
                best_step=self.state.best_global_step,
                before=self.before,
            )
            save_checkpoint(self, progress, states, self.num_kept)
        self.saved_step = step

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights as they were saved, or fail; Trainer goes on with others, and warns."""
        best = checkpoint_folder(self.checkpoints, self.state.best_global_step or 0)
        try:
            check_best(best)
        except NotWhole as reason:
            again = "Run the same command again: it goes on from before that step, and finds the best anew"
            raise TrainingFailed(f"{reason}. {again}", befell="this rank") from reason
        super()._load_best_model()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Restore the Trainer's state, but log, evaluate and save when the recipe says so now."""
        with quiet_libraries():  # it warns of settings that differ, which were announced
            restored: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.state.compute_steps(self.args, self.state.max_steps)
        self.state.train_batch_size = self.args.train_batch_size
        if self.state.best_global_step is not None:
            # By its place now: the run folder may have been moved.
            best = checkpoint_folder(self.checkpoints, self.state.best_global_step)
            self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        return restored

    def take_up(self) -> None:
        """Restore what Trainer has just reset, and do what was due when the run was broken off."""
        earlier = self.earlier
        if earlier is None or earlier.step != self.state.global_step:
            self._states_at_step_end = random_states()
            return
        # Trainer does so only where the first epoch begins, and what is due here is saved with them.
        self._load_rng_state(str(checkpoint_folder(self.checkpoints, earlier.step)))
        self._states_at_step_end = random_states()
        self._settle_buckets()
        self._tr_loss += earlier.loss_sum
        self._globalstep_last_logged = earlier.last_logged
        if earlier.max_steps != self.state.max_steps:
            self._follow_new_schedule(earlier.max_steps)
        if earlier.evaluation_due and self.eval_dataset is not None:
            self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)
            self._save_all(random_states())

    def _settle_buckets(self) -> None:
        """Run a micro-batch that trains nothing, so that DDP reduces the first step as every later one.

        It lays out its buckets anew after the first backward pass it has seen, and the place of a gradient in them
        decides the order in which more than two processes add it up. (torch's reducer, 2.13: 2e-8 on four processes.)
        """
        model = self.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            return
        states = random_states()
        model.train()
        filler = self.data_collator([FILLER])
        batch = self._prepare_inputs({**tensors_of(filler), "targets": filler["targets"], "use_cache": False})
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch, num_items_in_batch=torch.ones((), device=self.args.device))
        loss.backward()
        model.zero_grad()
        restore_random_states(states)

    def _follow_new_schedule(self, previous_steps: int) -> None:
        """Set the rate of the next step by the new length; the optimizer came with that of the old one."""
        scheduler = self.lr_scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            rates = [
                base * rate(scheduler.last_epoch)
                for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates
        step, rate = self.state.global_step + 1, self._get_learning_rate()
        if self.is_world_process_zero():
            text = f"schedule length changed from {previous_steps} to {self.state.max_steps} steps"
            print(f"note: {text}, learning rate at step {step} is {rate:g}", flush=True)


class Continuity(TrainerCallback):  # type: ignore[misc]
    """Tells a ResumableTrainer when training begins and when a step is done."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up what an earlier life of the run left."""
        self._trainer.take_up()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the window of the step."""
        self._trainer.close_window()
