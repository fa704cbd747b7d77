"""The recipe of finetune.py trained by a loop written by hand: DistributedDataParallel (DDP), line by line.

torchrun --nproc_per_node=4 train_ddp.py recipes/qwen7b_qlora.yaml
accelerate launch --num_processes 4 train_ddp.py recipes/qwen7b_qlora.yaml

Each process runs this whole file on a device of its own, holds a full replica of the model and sees its share of the
rows. What keeps the replicas one model: all take the same steps from the same weights. Recipe, plan, data, model and
rows are those of finetune.py, and so is the adapter, to 1e-6. docs/ddp.md tells the ideas, with a test for each.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tunebook.errors import Refused
from tunebook.launching.command_line import Command
from tunebook.launching.entry import run_rank
from tunebook.launching.process_group import meeting_point, no_group, start_process_group, stop_process_group
from tunebook.launching.world import World, read_world
from tunebook.plan.planning import plan_with_data, plan_without_data, show_plan, show_start
from tunebook.recipe.hand_loop import check_hand_loop
from tunebook.recipe.reading import load_recipe, placed_in
from tunebook.recipe.schema import Recipe
from tunebook.runs.folder import check_folder, hold_run_folder
from tunebook.training.agreement import check_replicas
from tunebook.training.batches import Rows, eval_batches, tensors_of
from tunebook.training.collectives import sum_over_processes
from tunebook.training.head_loss import Sums
from tunebook.training.loss import check_finite
from tunebook.training.measuring import Stopwatch, TokenCounts
from tunebook.training.stopping import StopVote
from tunebook.training.unused_parameters import check_all_used, naming_unused

if TYPE_CHECKING:
    from tunebook.training.outcome import RunResult
    from tunebook.training.ready import ReadyRun
    from tunebook.training.reporting import ProgressReport


def train_ddp(command: Command) -> None:
    """Run one rank, as finetune.py does: whatever can be refused is refused before weights load."""
    recipe = load_recipe(command.recipe, command.overrides)
    with placed_in(recipe):
        check_hand_loop(recipe)
        # A folder of its own, so that the runs of both programs can be compared.
        command = replace(command, run_dir=command.run_dir or str(Path("runs") / f"{recipe.stem}-ddp"))
        show_plan(recipe, command) if command.plan else train_recipe(recipe, command)


def train_recipe(recipe: Recipe, command: Command) -> None:
    """Train an accepted recipe in the world that the launcher made."""
    world = read_world(compute_dtype=recipe.model.dtype, ddp_backend=recipe.arguments.get("ddp_backend"))
    plan = plan_without_data(recipe, world, command.run_dir)
    check_folder(plan, recipe, command.fresh, goes_on=False)
    show_start(plan, world)

    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of
    from tunebook.training.ending import is_finished, show_result
    from tunebook.training.ready import build_run
    from tunebook.training.starting import find_start

    tokenizer = tokenizer_of(recipe)
    data = prepare_data(recipe, tokenizer)
    plan = plan_with_data(plan, data, world)
    with process_group(world, recipe.ddp_timeout):
        if is_finished(recipe, plan, world, tokenizer, data, command.fresh):
            return
        start = find_start(recipe, plan, world, tokenizer, data, command.fresh)
        run = build_run(recipe, plan, world, tokenizer, data, start.keep)
        with hold_run_folder(run.plan, recipe, world, start.identity, start.keep):
            show_result(train(run), plan, world)


@contextmanager
def process_group(world: World, timeout_seconds: int) -> Iterator[None]:
    """Join the ranks into one group, and leave it on the way out, of an error, too."""
    failed = True
    try:
        join(world, timedelta(seconds=timeout_seconds))
        # What this page shares with finetune.py asks accelerate for the world, which takes a group as it finds it.
        start_process_group(world, timeout_seconds)
        yield
        failed = False
    finally:
        # destroy_process_group closes the connections, and ranks that wait for this one fail at once. Over nccl it
        # would itself wait for collectives that the others never finish; there the end of the process must do.
        if not (failed and world.backend == "nccl"):
            stop_process_group()


def join(world: World, timeout: timedelta) -> None:
    """Meet the other ranks; no collective may then take longer than `timeout`."""
    if world.device_type == "cuda":
        # One process, one GPU: LOCAL_RANK counts the processes of this machine, RANK those of all machines. Without
        # this line every process would put its tensors on GPU 0.
        torch.cuda.set_device(world.local_rank)
    if world.backend is None:
        return  # a single process needs no group
    try:
        # The ranks find each other by what the launcher exported (MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE); after
        # a restart under names of their own, since the launcher still holds the addresses of those that died.
        distributed.init_process_group(world.backend, timeout=timeout, **meeting_point(timeout))
    except (RuntimeError, ValueError) as error:
        raise Refused(no_group(world, error)) from error


def train(run: "ReadyRun") -> "RunResult":
    """Measure, train, measure again and save; run_summary.json tells the state of it from the start."""
    from tunebook.training import outcome
    from tunebook.training.failures import saying_why

    # Only rank 0 writes and prints: the replicas are equal, so what one of them has to say is all there is.
    record = outcome.Record(run)
    loop = Loop(run, record.report)
    with record.kept(loop), saying_why(loop, run.plan):
        before = outcome.measure_held_out(loop, run)
        record.note_before(before)
        loop.train()
        after = outcome.measure_held_out(loop, run)
        # Rank 0 saves the module inside DDP, whose names have no "module." in front. The others wait until the files
        # are whole: a launcher may end everything once the first rank has left.
        notes = outcome.write_adapter_on_main(run, loop.model)
        notes += record.complete(loop, after)
    return outcome.RunResult(run, record.summary, before, after, notes)


class Loop:
    """The training loop of one rank."""

    def __init__(self, run: "ReadyRun", report: "ProgressReport | None") -> None:
        from transformers import get_scheduler

        from tunebook.training.progress import Progress, decay_groups

        num_steps = run.plan.num_optimizer_steps
        assert num_steps is not None and run.plan.steps_per_epoch is not None, "the data is known by now"
        self.run, self.args, self.world, self.per_epoch = run, run.arguments, run.world, run.plan.steps_per_epoch
        self.model = run.model  # this replica itself: to evaluate, to answer and to save it DDP is not needed
        self.ddp = wrap(run)
        betas, fused = (self.args.adam_beta1, self.args.adam_beta2), self.args.optim == "adamw_torch_fused"
        options = {"lr": self.args.learning_rate, "eps": self.args.adam_epsilon, "betas": betas, "fused": fused}
        self.optimizer = torch.optim.AdamW(decay_groups(run.model, self.args.weight_decay), **options)
        # Counted in optimizer steps, so it is moved once per step and not once per micro-step.
        warmup, course = self.args.get_warmup_steps(num_steps), self.args.lr_scheduler_kwargs
        self.schedule = get_scheduler(self.args.lr_scheduler_type, self.optimizer, warmup, num_steps, course)
        self.tokens, self.stopwatch, self.vote = TokenCounts(), Stopwatch(), StopVote(self.args.ddp_timeout)
        self.progress = Progress(self.args, num_steps, report, self.stopwatch)
        self.state = self.progress.state
        self.last_micro_batch: dict[str, Any] | None = None
        self.unlogged_loss = torch.zeros((), dtype=torch.float64, device=run.world.device)
        self.last_logged, self.evaluated = 0, (-1, 0.0)

    def train(self) -> None:
        """Take all optimizer steps: epoch by epoch, one global batch after another."""
        # The sampler deals every rank other rows of the same global batch, and equally many micro-batches: a rank with
        # one more would wait for ever in a collective that nobody joins.
        rows, workers = Rows(self.run.data.train), self.args.dataloader_num_workers
        pins = self.args.dataloader_pin_memory and self.world.device_type == "cuda"
        loader = DataLoader(
            rows, batch_sampler=self.run.batches, collate_fn=self.run.collate, num_workers=workers, pin_memory=pins
        )
        # The weights start from one seed. What is drawn from here on, dropout, should differ from rank to rank.
        torch.manual_seed(self.run.recipe.seed + self.world.rank)
        self.model.train()
        self.progress.begin()
        self.stopwatch.start()
        for epoch in range(math.ceil(self.state.max_steps / self.per_epoch)):
            # Each rank makes the order of all rows for itself and takes its own part of it, so all must name the same
            # epoch; without this line every epoch would have the order of the first (the sampler refuses that).
            self.run.batches.set_epoch(epoch)
            micro_batches = iter(loader)
            for step in range(min(self.per_epoch, self.state.max_steps - self.state.global_step)):
                self.take_step(list(islice(micro_batches, self.run.plan.gradient_accumulation_steps)))
                self.after_step(epoch + (step + 1) / self.per_epoch)
        self.stopwatch.stop()

    def take_step(self, window: list[dict[str, Any]]) -> None:
        """Take the optimizer step of one global batch, of which `window` holds this rank's micro-batches."""
        # The loss of a step is the sum over all labels of the global batch, divided by their number. That number is
        # needed before the first backward, and over all ranks: the average of each rank's own mean would give a label
        # on a rank with few of them more weight than one on a rank with many.
        [num_labels] = sum_over_processes([sum(one["num_trained_tokens"] for one in window)], self.world.device)
        self.progress.pace.count(num_labels)
        for place, micro_batch in enumerate(window):
            self.last_micro_batch = micro_batch
            is_last = place == len(window) - 1
            # A signal reaches the ranks at different moments, and one that left alone would have the others wait for it
            # in the next collective. So all vote before the last micro-step, and who knows of a wish votes at once.
            if is_last or (place > 0 and self.vote.is_asked):
                self.vote.agree()
            # Under no_sync, backward only adds to this rank's own gradients; their sum travels once, with the last
            # micro-step. There backward reduces bucket by bucket, each as soon as it is full, while the layers below
            # still compute theirs. The forward stands inside as well: in it DDP decides whether it will reduce.
            waits = not is_last and isinstance(self.ddp, DistributedDataParallel)
            with self.ddp.no_sync() if waits else nullcontext(), naming_unused(self.model):
                share = self.sum_losses(self.ddp, micro_batch).loss / num_labels
                # DDP averages the gradients of the ranks. Their sum is wanted, so the loss is scaled by the ranks.
                (share * self.world.num_processes).backward()
            self.unlogged_loss += share.detach()
            self.tokens.count(micro_batch)
        # From here on every rank holds the same gradient and does the same with it; nothing is sent any more.
        if self.ddp is not self.model and not self.args.ddp_find_unused_parameters:
            check_all_used(self.model, self.state.global_step + 1)
        # After the reduction the norm is that of the global batch. 0 means no clipping, as for Trainer.
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.grad_norm = torch.nn.utils.clip_grad_norm_(trained, self.args.max_grad_norm or math.inf)
        self.learning_rate = self.schedule.get_last_lr()[0]
        # step() never synchronises. Had the last backward run inside no_sync, each rank would step by a gradient of its
        # own, and the replicas would part without a word.
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def sum_losses(self, model: Any, micro_batch: dict[str, Any]) -> Sums:
        """Run the model, in the precision of the plan, and return the sum of the losses of all labels that count."""
        dtype, inputs = getattr(torch, self.run.plan.compute_dtype), tensors_of(micro_batch, self.world.device)
        targets = tensors_of(micro_batch["targets"], self.world.device)
        with torch.autocast(self.world.device_type, dtype=dtype, enabled=dtype != torch.float32):
            return self.run.head_loss.sums(model, inputs, targets, want_right=not torch.is_grad_enabled())

    def after_step(self, epoch: float) -> None:
        """Compare the replicas, log and evaluate where that is due."""
        due = self.progress.step(epoch)
        step, every = self.state.global_step, self.run.recipe.batch.check_replicas
        if every is not None and step % every == 0:
            check_replicas(self.model, step)
        if due.should_log:
            # A rank knows the loss of its own rows. What is logged is the sum of these shares over all ranks: the mean
            # over all labels of a step, averaged over the steps since the last log.
            [loss] = sum_over_processes([self.unlogged_loss.item()], self.world.device)
            loss /= step - self.last_logged
            check_finite(loss, step, self.learning_rate)
            self.progress.log(loss=loss, grad_norm=float(self.grad_norm), learning_rate=self.learning_rate)
            self.unlogged_loss.zero_()
            self.last_logged = step
        if due.should_evaluate:
            self.held_out_loss()

    def held_out_loss(self) -> float | None:
        """Return the mean loss of all held-out labels, each row in order and on one rank only; None without rows."""
        if not self.run.data.num_eval_rows:
            return None
        if self.evaluated[0] == self.state.global_step:
            return self.evaluated[1]
        rows, total, num_right, num_labels = Rows(self.run.data.evaluation), 0.0, 0.0, 0.0
        batches = eval_batches(len(rows), self.args.eval_batch_size, self.world.num_processes, self.world.rank)
        with self.stopwatch.paused(), torch.no_grad():
            self.model.eval()
            for batch in takewhile(lambda _: not self.vote.is_asked, batches):
                micro_batch = self.run.collate(rows.__getitems__(batch))
                # The replica itself, not DDP: there is no gradient to reduce.
                sums = self.sum_losses(self.model, micro_batch)
                total, num_right = total + sums.loss.item(), num_right + sums.right.item()
                num_labels += micro_batch["num_trained_tokens"]
            self.model.train()
            self.vote.agree()
            # Sums are added over ranks, never means: then neither batch size nor process count shows in the result.
            total, num_right, num_labels = sum_over_processes([total, num_right, num_labels], self.world.device)
        self.evaluated = self.state.global_step, total / max(num_labels, 1)
        check_finite(self.evaluated[1], self.state.global_step, None)
        self.progress.log(eval_loss=self.evaluated[1], eval_token_accuracy=num_right / max(num_labels, 1))
        return self.evaluated[1]


def wrap(run: "ReadyRun") -> Any:
    """Return the model in DDP, or the model itself in a world of one process.

    DDP sends rank 0's weights to all ranks now, and averages gradients in every backward from here on. Frozen weights
    have no gradient, so of a QLoRA model only the adapter travels.
    """
    args, world = run.arguments, run.world
    if args.activation_checkpointing:
        run.model.activation_checkpointing_enable(activation_checkpointing_kwargs=args.activation_checkpointing_kwargs)
    if world.num_processes == 1:
        return run.model
    return DistributedDataParallel(
        run.model,
        device_ids=[world.local_rank] if world.device_type == "cuda" else None,
        # Searching the graph in each step costs time; every trained parameter takes part here (check_all_used).
        find_unused_parameters=bool(args.ddp_find_unused_parameters),
        # Buffers would be sent before each forward: they are equal from the start, and no layer here changes them.
        forward_sync_buffers=bool(args.ddp_broadcast_buffers),
        bucket_cap_mb=args.ddp_bucket_cap_mb,
    )


if __name__ == "__main__":
    run_rank(train_ddp)
