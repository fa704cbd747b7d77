"""A trained parameter that takes no part in a step: found in that step, and named.

DDP reduces a bucket of gradients once all of them are there. A gradient that never comes leaves its bucket unreduced:
torch says so one step later, by number, or not at all after the last step, and ranks that do have it wait for ever.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from tunebook.errors import TrainingFailed

SETTING = "training.ddp_find_unused_parameters"
NUM_NAMED = 3


def check_all_used(model: Any, step: int) -> None:
    """Raise TrainingFailed, naming them, where trained parameters have no gradient before optimizer step `step`.

    `model` is the module that DDP wraps. Only this rank may have met the branch that leaves them out.
    """
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        raise _failure(unused, f"in step {step}")


@contextlib.contextmanager
def naming_unused(model: Any) -> Iterator[None]:
    """Turn DDP's numbers of unused parameters into TrainingFailed with their names.

    A parameter that only the last micro-step of a step leaves out has a gradient, of the micro-steps before; DDP
    notices it at the next forward.
    """
    try:
        yield
    except RuntimeError as error:
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", str(error))
        if numbers is None:
            raise
        names = [name for name, one in model.named_parameters() if one.requires_grad]
        unused = [names[int(number)] for number in re.findall(r"\d+", numbers[1])]
        raise _failure(unused, "in the last micro-step of the step before") from error


def _failure(unused: list[str], when: str) -> TrainingFailed:
    more = f" and {len(unused) - NUM_NAMED} more" if len(unused) > NUM_NAMED else ""
    message = (
        f"unused trained parameters: {', '.join(unused[:NUM_NAMED])}{more} got no gradient {when}, and DDP reduces "
        f"only what every rank has. Leave them out of lora, or set {SETTING}=true, which searches the graph each step"
    )
    return TrainingFailed(message, befell="this rank")
