"""A conversation with what came out of a run: answers as they are written, and the base model's beside them."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from tunebook.data.conversation import Conversation, Fault, Message
from tunebook.export.finished import Finished, open_finished
from tunebook.plan.table import build_console
from tunebook.using.trained import Trained, before_training, load_trained

MAX_NEW_TOKENS = 512
MARK = "> "
HELP = """\
/base    the base model's answer to the last question, beside the trained model's
/reset   forget the conversation
/help    this list
Ctrl-C stops an answer; an empty line or Ctrl-D ends."""
ONE_BY_ONE = "the model was trained on the Alpaca text, which has no turns: each line is a question of its own"


def chat(
    run_dir: str, lines: Iterable[str] | None = None, max_new_tokens: int | None = None, base: str | None = None
) -> None:
    """Answer each line, greedily, with the model of a run, which sees the conversation so far.

    Without `lines` they are typed: those of standard input. Answers go to stdout, everything else to stderr. `base`
    is where its base lies now. Raises Refused where `run_dir` holds no run that came to its end.
    """
    finished = open_finished(run_dir, base)
    talk = Talk(finished, load_trained(finished), max_new_tokens or MAX_NEW_TOKENS)
    is_typed = lines is None and sys.stdin.isatty()
    if is_typed:
        say("Ask something. /help lists the commands; an empty line or Ctrl-D ends.")
        talk.explain_turns()
    for line in typed_lines() if is_typed else sys.stdin if lines is None else lines:
        if not line.strip():
            break
        try:
            talk.hear(line.strip())
        except KeyboardInterrupt:
            if not is_typed:
                raise


class Talk:
    """One conversation: the turns so far, and the last question as it was asked."""

    def __init__(self, finished: Finished, trained: Trained, max_new_tokens: int) -> None:
        from tunebook.training.decoding import limits_of, stop_ids
        from tunebook.using.asking import Asking

        self._finished, self._trained, self._most = finished, trained, max_new_tokens
        self._asking = Asking(trained.tokenizer, trained.prompts)
        stop, settings = trained.prompts.stop_token_id, trained.model.generation_config
        self._stops = stop_ids(trained.tokenizer, stop, settings)
        self._positions = limits_of(trained.model.config).positions
        self._is_explained = False
        self._reset()

    def hear(self, line: str) -> None:
        """Do what a command says, or answer a question."""
        commands: dict[str, Callable[[], None]] = {
            "/base": self._compare,
            "/reset": self._forget,
            "/help": partial(say, HELP),
        }
        if line in commands:
            commands[line]()
        elif re.fullmatch(r"/\w*", line):
            say(f"There is no {line}.\n{HELP}")
        else:
            self._answer(Message("user", line))

    def explain_turns(self) -> None:
        """Say once that the model cannot have a conversation, where it cannot."""
        if not self._asking.keeps_turns and not self._is_explained:
            self._is_explained = True
            say(f"note: {ONE_BY_ONE}")

    def _reset(self) -> None:
        self.turns: list[Message] = []
        self._asked: list[int] | None = None
        self._answered = ""

    def _forget(self) -> None:
        self._reset()
        say("The conversation is forgotten.")

    def _answer(self, question: Message) -> None:
        if self._asked is not None:
            self.explain_turns()
        ids = self._fit(question)
        if ids is None:
            return
        self._asked = ids
        answer, is_whole = self._write(self._trained.model, ids, show_piece)
        print(flush=True)
        if is_whole is None:
            say("(stopped)")
        elif not is_whole:
            say(f"(cut after {self._room(ids)} tokens)")
        self._answered = answer
        if self._asking.keeps_turns and answer.strip():
            self.turns += [question, Message("assistant", answer)]

    def _fit(self, question: Message) -> list[int] | None:
        """Return the prompt of a question after the turns so far, of which the oldest are dropped where all don't fit.

        None where the question itself is too long, or cannot be shown to the model, which is said.
        """
        num_dropped, room = 0, self._most
        if self._positions is not None:
            room = min(room, self._positions // 2)
        while True:
            [ids] = self._asking.prompt_ids([Conversation((*self.turns, question))])
            if isinstance(ids, Fault):
                if not self.turns:
                    say(f"This question can't be asked: {ids.reason}.")
                    return None
                say(f"note: the turns so far are left out: {ids.reason}")
                self.turns = []
            elif self._positions is None or len(ids) + room <= self._positions:
                break
            elif self.turns:
                self.turns, num_dropped = self.turns[2:], num_dropped + 1
            elif len(ids) >= self._positions:
                say(f"This question has {len(ids)} tokens with its prompt, and the model reads {self._positions}.")
                return None
            else:
                break
        if num_dropped:
            turns = "turn is" if num_dropped == 1 else f"{num_dropped} turns are"
            say(f"note: the oldest {turns} left out, the model reads {self._positions} tokens")
        return ids

    def _compare(self) -> None:
        """Show the base model's answer to the very prompt that was answered last, beside that answer."""
        from rich.table import Table
        from rich.text import Text

        if self._asked is None:
            say("There is no question yet.")
            return
        with before_training(self._trained, self._finished) as base:
            answer, is_whole = self._write(base, self._asked, show=lambda text: None)
        if is_whole is None:
            say("(stopped)")
            return
        table = Table("trained", "base", expand=True, show_edge=False)
        for column in table.columns:
            column.ratio = 1
        answers = (self._answered, answer)
        table.add_row(*(Text(_without_controls(one)) for one in answers))
        build_console().print(table)

    def _write(self, model: Any, ids: list[int], show: Callable[[str], None]) -> tuple[str, bool | None]:
        """Return the answer to a prompt, and whether it came to its end: None where Ctrl-C stopped it."""
        import torch

        from tunebook.training.decoding import answering, write_batch
        from tunebook.using.streaming import ShownAnswer

        tokenizer, room = self._trained.tokenizer, self._room(ids)
        streamer = ShownAnswer(tokenizer, self._stops, show)
        dtype = getattr(torch, self._finished.plan.compute_dtype)
        try:
            with answering(model, dtype) as bare_model:
                [written] = write_batch(bare_model, tokenizer, [ids], self._stops, room, streamer=streamer)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            return streamer.text, None
        return streamer.text, written.is_whole

    def _room(self, ids: list[int]) -> int:
        """Return how many tokens the answer to a prompt may have."""
        return self._most if self._positions is None else min(self._most, self._positions - len(ids))


def typed_lines() -> Iterator[str]:
    """Yield the lines that are typed at the terminal, which can be edited and called back."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines once it is imported
    while True:
        try:
            if not sys.stdout.isatty():  # which is for the answers
                print(MARK, end="", file=sys.stderr, flush=True)
            yield input(MARK if sys.stdout.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends.")


def show_piece(text: str) -> None:
    """Print a piece of an answer as it is; on a terminal without the characters that the terminal would obey."""
    print(_without_controls(text) if sys.stdout.isatty() else text, end="", flush=True)


def say(text: str) -> None:
    """Print something that is no answer."""
    print(text, file=sys.stderr, flush=True)


def _without_controls(text: str) -> str:
    from tunebook.using.streaming import without_controls

    return without_controls(text)
