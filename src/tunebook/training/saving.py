"""What a checkpoint holds, so that going on from it is the run that was never broken off; written by rank 0 alone."""

import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from tunebook.errors import TrainingFailed
from tunebook.runs.checkpoints import (
    PROGRESS,
    Checkpoint,
    checkpoint_folder,
    delete_older,
    finish_checkpoint,
    list_checkpoints,
)
from tunebook.system.quiet import quiet_libraries
from tunebook.system.writing import explain_unwritten, folder_beside, write_whole
from tunebook.training.collectives import from_rank_0, gather_shares, sum_over_processes
from tunebook.training.measuring import TokenCounts


@dataclass(frozen=True)
class Progress:
    """What a run has done and measured so far, over all processes and all its lives.

    `loss_sum` adds up the losses of the steps since step `last_logged`, which the next log will average.
    `evaluation_due` tells that step `step` is not measured yet, `best_step` where the best held-out loss was measured;
    `before` is what was measured of held-out rows before step 1.
    """

    step: int
    max_steps: int
    tokens: dict[str, int]
    training_seconds: float
    wall_seconds: float
    loss_sum: float
    last_logged: int
    evaluation_due: bool
    best_step: int | None
    before: dict[str, Any]


def random_states() -> dict[str, Any]:
    """Return the state of every generator that training may draw from, in the form the Trainer loads."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        # As Trainer does: of all devices in a group, of its own where a process is alone.
        alone = not torch.distributed.is_initialized()
        states["cuda"] = torch.cuda.get_rng_state() if alone else torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set every generator to what `random_states` returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if isinstance(cuda := states.get("cuda"), list):
        torch.cuda.set_rng_state_all(cuda)
    elif cuda is not None:
        torch.cuda.set_rng_state(cuda)


def save_checkpoint(trainer: Trainer, progress: Progress, states: dict[str, Any], num_kept: int | None) -> None:
    """Save the trainer as it stands after `progress.step`, then delete checkpoints beyond `num_kept`.

    Collective. Raises TrainingFailed on every process when rank 0 cannot write; earlier checkpoints then still stand.
    """
    states_of_all = gather_shares([states])
    problem = None
    if trainer.args.should_save:
        folder = checkpoint_folder(Path(trainer.args.output_dir), progress.step)
        try:
            saved = _write(trainer, progress, states_of_all, folder)
            delete_older(saved, num_kept, trainer.state.best_global_step)
        # torch and safetensors have errors of their own for a full disk.
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = _explain(error, folder)
    problem = from_rank_0(problem)
    if problem is not None:
        raise TrainingFailed(problem)


def sum_tokens(tokens: TokenCounts, device: str) -> dict[str, int]:
    """Return the token counts over all processes."""
    names = list(asdict(tokens))
    sums = sum_over_processes(list(asdict(tokens).values()), device)
    return {name: int(number) for name, number in zip(names, sums, strict=True)}


def _write(trainer: Trainer, progress: Progress, states: list[dict[str, Any]], folder: Path) -> Checkpoint:
    beside = folder_beside(folder)
    try:
        with quiet_libraries():
            trainer._save(str(beside))
        torch.save(trainer.optimizer.state_dict(), beside / "optimizer.pt")
        torch.save(trainer.lr_scheduler.state_dict(), beside / "scheduler.pt")
        trainer._save_scaler(str(beside))
        for rank, state in enumerate(states):
            torch.save(state, beside / ("rng_state.pth" if len(states) == 1 else f"rng_state_{rank}.pth"))
        trainer.state.save_to_json(str(beside / TRAINER_STATE_NAME))
        write_whole(beside / PROGRESS, json.dumps(asdict(progress), indent=1) + "\n")
        return finish_checkpoint(beside, folder, progress.step)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # on a full disk its space is needed
        raise


def _explain(error: Exception, folder: Path) -> str:
    goes_on = "Earlier checkpoints are whole; make room and run the same command again, which goes on from the newest"
    starts = "No checkpoint was saved before; make room and run the same command again"
    return f"{explain_unwritten(error, folder)}. {goes_on if list_checkpoints(folder.parent) else starts}"
