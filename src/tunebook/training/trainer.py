"""transformers' Trainer, with the batches, the evaluation and the checks that exactness needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from tunebook.model.adapter import write_adapter_weights
from tunebook.training.agreement import check_replicas
from tunebook.training.batches import GlobalBatchSampler, Rows, eval_batches, tensors_of
from tunebook.training.collectives import sum_over_processes
from tunebook.training.loss import check_finite
from tunebook.training.measuring import Pace
from tunebook.training.ready import ReadyRun
from tunebook.training.resumable import ResumableTrainer
from tunebook.training.unused_parameters import check_all_used, naming_unused


class RecipeTrainer(ResumableTrainer):
    """Trains on global batches that depend on seed, epoch and step alone, and evaluates each held-out token once.

    The loss of a step is the sum over all labels of the global batch, on all processes, divided by their number. The
    logged `loss` is the mean of that over the steps since the last log. `eval_loss` is the sum over all labels of the
    held-out rows divided by their number, whatever the batch size and the number of processes. No model computes a loss
    here: many take the mean of a micro-batch, and Trainer smooths some without the shift to the next token.
    """

    loss_is_scaled_for_ga = True  # accumulated losses add up to that of the step

    def __init__(self, run: ReadyRun, callbacks: list[TrainerCallback]) -> None:
        self.batches = run.batches
        self.last_micro_batch: dict[str, Any] | None = None
        self._head_loss = run.head_loss
        super().__init__(
            model=run.model,
            args=run.arguments,
            wall=run.wall,
            data_collator=run.collate,
            train_dataset=Rows(run.data.train),
            eval_dataset=Rows(run.data.evaluation) if run.data.num_eval_rows else None,
            callbacks=[TrainingPace(self), *callbacks],
        )
        self.pace = Pace(self.stopwatch)
        self.remove_callback(PrinterCallback)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Count the labels of the step, whose number over all processes Trainer has asked for anyway."""
        micro_batches, num_labels = super().get_batch_samples(*args, **kwargs)
        self.pace.count(num_labels)
        return micro_batches, num_labels

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Count the micro-batch's tokens from its shape, without touching the device, and train on it."""
        self.check_stop()
        self.last_micro_batch = inputs
        self.tokens.count(inputs)
        with naming_unused(self.model), _train_mode_kept(model, self.model):
            # A cache would hide that joined rows are several, whatever the model's own setting is.
            trained = {**tensors_of(inputs), "targets": inputs["targets"], "use_cache": False}
            return super().training_step(model, trained, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this process's share of the loss of a step: the sum over its labels by the number of all.

        Times the processes, whose gradients DDP averages.
        """
        targets, smoothing = inputs.pop("targets"), self.args.label_smoothing_factor
        sums = self._head_loss.sums(model, inputs, targets, smoothing=smoothing)
        loss = sums.loss / num_items_in_batch
        self.meet_in_backward()
        return (loss * self.accelerator.num_processes).float()

    def held_out_loss(self) -> float | None:
        """Return the held-out loss of the weights as they stand, or None where no rows are held out.

        It is measured now unless Trainer did so after the last step.
        """
        if self.eval_dataset is None:
            return None
        here = self.state.global_step
        known = [past for past in self.state.log_history if past["step"] == here and "eval_loss" in past]
        # The best checkpoint, loaded at the end, is not what the last evaluation saw.
        if known and not self.args.load_best_model_at_end:
            return float(known[-1]["eval_loss"])
        return self.evaluate()["eval_loss"]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this process's share of the rows in order, each row on one process only."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = eval_batches(len(rows), self.args.eval_batch_size, self.args.world_size, self.args.process_index)
        # A generator of its own: drawing the loader's seed from torch's would change the dropout of the next step.
        return DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator, generator=torch.Generator())

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return loss and accuracy over the labels of all rows on all processes; no logits outlive their batch."""
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        num_right = torch.zeros((), dtype=torch.int64, device=self.args.device)
        num_labels = 0
        for batch in dataloader:
            if self.vote.is_asked and not self.is_fsdp_enabled:
                break
            num_labels += batch["num_trained_tokens"]
            inputs = self._prepare_input({**tensors_of(batch), "targets": batch["targets"]})
            targets = inputs.pop("targets")
            with torch.no_grad(), self.accelerator.autocast():
                found = self._head_loss.sums(self.model, inputs, targets, want_right=True)
            total += found.loss
            num_right += found.right
        self.model.train(was_training)
        self.vote.agree()
        sums = [total.item(), num_right.item(), num_labels]
        loss, right, of_all = sum_over_processes(sums, self.args.device)
        metrics = {"loss": loss / max(of_all, 1), "token_accuracy": right / max(of_all, 1)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does, with the speed beside the loss.

        Raises TrainingFailed, on every process alike, when the loss is no number any more.
        """
        for name in ("loss", "eval_loss"):
            check_finite(logs.get(name, 0.0), self.state.global_step, logs.get("learning_rate"))
        if "loss" in logs and (pace := self.pace.read()) is not None:
            logs["tokens_per_second"] = pace
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the estimate would walk over all parameters at every micro-batch, and nothing reads it."""
        return 0

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip by the norm over what is trained, without the walk over all parameters; FSDP asks for those."""
        if self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm)

    def _clear_gradients(self, set_to_none: bool = True) -> None:
        for parameter in self._trained:
            parameter.grad = None

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _get_train_sampler(self, train_dataset: Any = None) -> GlobalBatchSampler:
        return self.batches

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Spare DDP the broadcast of buffers in each step, which would overwrite what a rank's own rows made of them.

        They are equal at the start. Set on the module, since the argument that accelerate passes on is deprecated.
        And spare each step a walk over all parameters to clear the gradients of those that are trained.
        """
        model, dataloader = super()._prepare_for_training(*args, **kwargs)
        if not self.is_fsdp_enabled:
            model.zero_grad = self._clear_gradients
        if isinstance(model, DistributedDataParallel) and self.args.ddp_broadcast_buffers is None:
            model.forward_sync_buffers = False
        return model, dataloader

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save an adapter without peft's blank model card and its look at the Hub for the base's vocabulary."""
        if not isinstance(self.model, PeftModel):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_adapter_weights(self.model, folder)
            self.model.peft_config["default"].save_pretrained(folder)


@contextmanager
def _train_mode_kept(wrapped: Any, bare: Any) -> Iterator[None]:
    """Spare a model that is in training mode the walk over all its modules that Trainer has it take per micro-batch.

    In a profile of the tiny model's steps that walk is a tenth of them.
    """
    if not (wrapped.training and bare.training):
        yield
        return
    wrapped.train = lambda mode=True: wrapped
    try:
        yield
    finally:
        del wrapped.train


class ReplicaCheck(TrainerCallback):  # type: ignore[misc]
    """Sees that each gradient is there before a step, and compares the replicas every `every` steps (None: never)."""

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Look for trained parameters that no row reached, unless the recipe lets DDP search for them."""
        if args.world_size > 1 and not args.ddp_find_unused_parameters:
            check_all_used(model, state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Compare the replicas where that is due."""
        if self._every is not None and state.global_step % self._every == 0:
            check_replicas(model, state.global_step)


class TrainingPace(TrainerCallback):  # type: ignore[misc]
    """Tells the sampler each epoch's number, keeps the clock of training, and has the last step logged."""

    def __init__(self, trainer: RecipeTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock once everything is prepared."""
        self._trainer.stopwatch.start()
        self._trainer.pace.begin()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch: Trainer's own call stops at the wrappers that accelerate puts around a resumed sampler.

        It is counted in whole steps: `state.epoch` is a sum of fractions.
        """
        batches = self._trainer.batches
        batches.set_epoch(state.global_step // batches.num_global_batches)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the last step whatever logging_steps is, so that the final loss is known."""
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock."""
        self._trainer.stopwatch.stop()
