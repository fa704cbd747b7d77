"""Runs a training program with a clock on its optimizer steps: `clock.py OUT TARGET ARGUMENTS`, under torchrun.

TARGET is a file or, as `-m NAME`, a module. Each process that has trained to the end writes OUT-rank<r>.json: when each
optimizer step ended, the labels of the first, each logged loss, what is trained and how, and the versions of what it
runs on. The same hooks are put into every program that trains by transformers' Trainer, so nobody's clock is kinder
than another's. It imports nothing of tunebook, since peers have environments of their own; the loop of train_ddp.py is
watched where it counts its steps.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "trl",
    "lightning",
    "llamafactory",
    "axolotl",
)


class StepClock:
    """What one process saw of its training.

    `first_labels` are those of the first step, of this process's rows or, where `counts_all` is set, of all. `trains`
    is what the first step's optimizer holds, `gradient_norm` that before the first clipping, `moved` the norm, at the
    end, of the matrices that were 0 at the start (B of LoRA): learning rate, optimizer and number of steps show in it.
    """

    def __init__(self) -> None:
        self.out = ""
        self.ends: list[float] = []
        self.losses: list[tuple[int, float]] = []
        self.first_labels: int | None = None
        self.counts_all = False
        self.trains: dict[str, Any] | None = None
        self.gradient_norm: float | None = None
        self.moved = 0.0
        self._were_zero: list[Any] = []

    def end_step(self) -> None:
        """Note that an optimizer step is over."""
        self.ends.append(time.perf_counter())

    def see_labels(self, number: Callable[[], int]) -> None:
        """Count the labels of the first step; of the later ones nothing is looked at, so as to cost nothing."""
        if self.first_labels is None:
            self.first_labels = number()

    def see_loss(self, step: int, loss: float) -> None:
        """Note a logged loss."""
        self.losses.append((step, loss))

    def see_optimizer(self, optimizer: Any) -> None:
        """Note, before the first step, how many numbers of which type are trained, and the optimizer's settings."""
        if self.trains is not None:
            return
        weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        types = sorted({f"{one.dtype}, gradient {one.grad.dtype}" for one in weights})
        names = ("lr", "betas", "eps", "weight_decay", "fused")
        settings = [{name: group[name] for name in names} for group in optimizer.param_groups if group["params"]]
        self.trains = {
            "numbers": sum(one.numel() for one in weights),
            "types": types,
            "optimizer": type(optimizer).__name__,
            "settings": [one for place, one in enumerate(settings) if one not in settings[:place]],
        }
        self._were_zero = [one for one in weights if not one.any()]

    def write(self) -> None:
        """Write what was seen, as JSON, whole or not at all."""
        self.moved = sum(float(one.detach().float().square().sum()) for one in self._were_zero) ** 0.5
        found: dict[str, Any] = {**vars(self), "versions": {}}
        del found["_were_zero"]
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                found["versions"][name] = version(name)
        out = Path(found.pop("out"))
        out.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        out.with_suffix(".part").replace(out)


CLOCK = StepClock()


def count_labels(micro_batches: list[Any]) -> int:
    """Return the labels that count: those that are not -100, of which the first of a row is never asked for."""
    return sum(int((one["labels"][:, 1:] != -100).sum()) for one in micro_batches)


def watch_optimizer() -> None:
    """Have the first clipping and the first step of this process's optimizer tell the clock."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    clip = torch.nn.utils.clip_grad_norm_

    def clipped(*arguments: Any, **named: Any) -> Any:
        norm = clip(*arguments, **named)
        if CLOCK.gradient_norm is None:
            CLOCK.gradient_norm = float(norm)
        return norm

    torch.nn.utils.clip_grad_norm_ = clipped
    register_optimizer_step_pre_hook(lambda optimizer, *_: CLOCK.see_optimizer(optimizer))


def watch_trainer() -> None:
    """Have every Trainer of this process tell the clock, and train its adapter in float32."""
    from transformers import Trainer, TrainerCallback, trainer

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            CLOCK.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                CLOCK.see_loss(state.global_step, float(logs["loss"]))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            CLOCK.write()  # not at the exit: a process of TRL's may wait there for ever for one that has left

    samples, train = Trainer.get_batch_samples, Trainer.train

    def train_in_float32(self: Any, *arguments: Any, **named: Any) -> Any:
        # TRL puts the adapter of a quantised model into bfloat16, whatever --dtype says, which no CPU is fast in that
        # has no instructions for it. For all others nothing changes here.
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
        return train(self, *arguments, **named)

    def get_batch_samples(self: Any, *arguments: Any, **named: Any) -> Any:
        found = samples(self, *arguments, **named)
        CLOCK.see_labels(lambda: count_labels(found[0]))
        return found

    trainer.DEFAULT_CALLBACKS.append(Watch)
    Trainer.get_batch_samples, Trainer.train = get_batch_samples, train_in_float32


def watch_hand_loop() -> None:
    """Have train_ddp.py's loop tell the clock, by what it calls after each step."""
    from tunebook.training.measuring import Pace
    from tunebook.training.progress import Progress

    step, log, count = Progress.step, Progress.log, Pace.count

    def stepped(self: Any, epoch: float) -> Any:
        CLOCK.end_step()
        return step(self, epoch)

    def logged(self: Any, **numbers: float) -> None:
        if "loss" in numbers:
            CLOCK.see_loss(self.state.global_step, numbers["loss"])
        log(self, **numbers)

    def counted(self: Any, num_labels: Any) -> None:
        CLOCK.counts_all = True
        CLOCK.see_labels(lambda: int(num_labels))
        count(self, num_labels)

    Progress.step, Progress.log, Pace.count = stepped, logged, counted  # type: ignore[method-assign]


def main(out: str, *target: str) -> None:
    """Run the target as if it had been started itself, and write what the clock saw."""
    CLOCK.out = f"{out}-rank{os.environ['RANK']}.json"
    is_module = target[0] == "-m"
    name, arguments = (target[1], target[2:]) if is_module else (target[0], target[1:])
    sys.argv = [name, *arguments]
    watch_optimizer()
    watches_itself = Path(name).name in ("train_ddp.py", "lightning_loop.py")
    if Path(name).name == "train_ddp.py":
        watch_hand_loop()
    elif not watches_itself:
        watch_trainer()
    (runpy.run_module if is_module else runpy.run_path)(name, run_name="__main__")
    if watches_itself:
        CLOCK.write()


if __name__ == "__main__":
    # `clock`, not __main__, is what a target that imports this file finds its clock in.
    sys.modules["clock"] = sys.modules["__main__"]
    main(*sys.argv[1:])
