"""What can go wrong for a user, and the exit code each kind ends with."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunebook.system.secret_text import hide_tokens

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_UNPUBLISHED = 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: the same command again may succeed

# What gloo and nccl say when another process of the group has ended; neither has a type of its own for it.
PEER_IS_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
PEER_ENDED = "another process of the group ended; the launcher names the one that did so first"
# A rank that failed alone gives rank 0 so long to say the same. Those that feel its end wait for longer: so it says
# why, and the launcher, which looks every 0.1 s, meets it as the only one that has left, and names it the root cause.
SECONDS_FOR_RANK_0 = 2.0
SECONDS_FOR_FAILED_RANK = 2.5
# torch has an error of its own for its allocator on a GPU, and none for a CPU.
NO_MEMORY = (
    "can't allocate memory", "cannot allocate memory", "not enough memory", "cuda error: out of memory",
    # What its libraries and its driver say for it there are plain RuntimeErrors.
    "cuda driver error: out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
)  # fmt: skip
LONGEST_SHOWN = 60
# Beyond these nobody reads on: problems of one report, and characters of one problem.
MOST_PROBLEMS, LONGEST_PROBLEM = 100, 4000


@dataclass(frozen=True)
class Problem:
    """One mistake, with where it stands and what to do about it.

    `where` is a place the user can open (`recipes/x.yaml:12`, `data.jsonl:3`, an environment variable), `key` the
    dotted recipe key (`training.learning_rate`) if there is one.
    """

    message: str
    fix: str = ""
    where: str = ""
    key: str = ""

    def render(self) -> str:
        """Return `where: key: message. fix` on one line, leaving out what is unknown."""
        text = ": ".join(part for part in (self.where, self.key, self.message) if part)
        return _shown_safely(f"{text.rstrip('.')}. {self.fix}" if self.fix else text)


def _shown_safely(text: str) -> str:
    """Return a text on one line, without control characters, and without the tokens that users paste into names."""
    text = hide_tokens(text)
    if len(text) > LONGEST_PROBLEM:  # what is wrong stands at its start, the fix at its end
        text = f"{text[: 3 * LONGEST_PROBLEM // 4]} ... {text[-LONGEST_PROBLEM // 4 :]}"
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


class Refused(ValueError):
    """The recipe, the data or the launch is refused before any weights load; nothing was written.

    Carries every problem found, not only the first. Ends the process with exit code 2 and no traceback.
    """

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "a refusal names at least one problem"
        super().__init__(self.render())

    def render(self) -> str:
        """Return the whole report: a count when there are several problems, then one line for each."""
        lines = [problem.render() for problem in self.problems]
        if len(lines) == 1:
            return f"refused: {lines[0]}"
        more = [f"and {len(lines) - MOST_PROBLEMS} more"] if len(lines) > MOST_PROBLEMS else []
        return "\n".join([f"refused: {len(lines)} problems", *(f"  {line}" for line in lines[:MOST_PROBLEMS] + more)])


def refuse_name(error: OSError) -> Refused:
    """Return the refusal of a name, given for whatever is read, that the system takes for none; raise other errors."""
    if error.errno != errno.ENAMETOOLONG:
        raise error
    name = str(error.filename)
    shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
    return Refused(Problem(f"{shown} is too long for a name", "Correct the name"))


class TrainingFailed(RuntimeError):
    """Training cannot go on, for a reason that is told in one line. Ends the process with exit code 1.

    `befell` tells whom: all ranks alike, this rank without the others knowing (it ran out of memory), or another rank
    first, of which this one only feels the loss.
    """

    def __init__(self, message: str, befell: Literal["all", "this rank", "another rank"] = "all") -> None:
        self.befell = befell
        super().__init__(message)


class NotPublished(RuntimeError):
    """Everything is trained and on disk, and the Hub has not taken it. Ends the process with exit code 3.

    The message says why, what helps, where the adapter is and the command that tries again.
    """


class Interrupted(BaseException):
    """A signal asked the run to stop, and it did after saving at `step` (0: nothing). Ends the process in exit code 75.

    No Exception, so that nothing between takes it for a failure that can be handled.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def is_peer_gone(error: Exception) -> bool:
    """Return whether an error is only what this process feels of another one's end."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in PEER_IS_GONE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device, or the machine, has no more memory to give; none of ours does."""
    if isinstance(error, Refused | TrainingFailed):
        return False
    # torch's by its name: it is not imported for the question.
    is_memory_error = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_memory_error or any(words in str(error).lower() for words in NO_MEMORY)


def what_ran_out(error: BaseException) -> str:
    """Return what an error says of memory that ran out, or that it did."""
    return str(error).split(". ", maxsplit=1)[0] or "out of memory"
