"""What must be equal on all ranks: the run they are about to begin, and afterwards their replicas of the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

from tunebook.errors import Problem, Refused, TrainingFailed
from tunebook.model.adapter import tensor_sha256
from tunebook.system.whereabouts import arrive


def check_same_start(facts: Mapping[str, Any]) -> None:
    """Raise the same Refused on every rank where the ranks are about to begin different runs.

    A rank with other rows, another step count or another recipe would leave the others waiting in a collective for
    ever, or train something else without a word. `facts` are plain values by name; each rank must call this.
    """
    by_rank = _gather({name: str(value) for name, value in facts.items()})
    names = dict.fromkeys(name for one in by_rank for name in one)
    values = {name: [one.get(name, "absent") for one in by_rank] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    if differing:
        said = "; ".join(f"{name} {_by_rank(values[name])}" for name in differing)
        fix = "Give every rank the same recipe, data and version, on every machine"
        raise Refused(Problem(f"the ranks would not train the same run: {said}", fix, "launch"))


def check_replicas(model: Any, step: int) -> None:
    """Raise TrainingFailed on every rank unless all ranks hold the same bits in each trained tensor after `step`.

    DDP keeps replicas equal by giving all of them the same gradient; nothing in it compares them. Hashes are compared,
    tensors stay where they are. Each rank must call this.
    """
    hashes = {name: tensor_sha256({name: one}) for name, one in model.named_parameters() if one.requires_grad}
    by_rank = _gather(hashes)
    for name in hashes:
        values = [one.get(name, "lacking")[:8] for one in by_rank]
        if len(set(values)) > 1:
            raise TrainingFailed(
                f"the replicas differ after step {step}: {name} is {_by_rank(values)}. What was trained since the last "
                "equal step is lost; a device that computes wrongly, or code that changes weights on some ranks only, "
                "does this"
            )


def _gather(value: dict[str, str]) -> list[dict[str, str]]:
    if not distributed.is_initialized():
        return [value]
    arrive("the comparison of all ranks")
    by_rank: list[dict[str, str]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(by_rank, value)
    return by_rank


def _by_rank(values: Sequence[str]) -> str:
    """Return `5 on rank 0, 4 on ranks 1 and 2`: each value once, with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    parts = []
    for value, having in ranks.items():
        named = " and ".join(part for part in (", ".join(having[:-1]), having[-1]) if part)
        parts.append(f"{value} on rank{'s' if len(having) > 1 else ''} {named}")
    return ", ".join(parts)
