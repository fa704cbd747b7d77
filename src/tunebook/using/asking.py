"""What the model is asked, as it was prompted in training: from the turns so far to the ids that it answers."""

from collections.abc import Sequence
from typing import Any

from tunebook.data.conversation import Conversation, Fault, Message
from tunebook.data.prompts import AlpacaPrompts, Prompts
from tunebook.data.tokens import TurnEncoder

# Stands for the answer that is asked for; the prompt before it does not depend on it.
ANY_ANSWER = "-"


class Asking:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Any, prompts: Prompts) -> None:
        self._prompts = prompts
        self._encoder = TurnEncoder(tokenizer, prompts)

    @property
    def keeps_turns(self) -> bool:
        """Whether a question can come after others; the Alpaca text has one question and one answer."""
        return not isinstance(self._prompts, AlpacaPrompts)

    def prompt_ids(self, rows: Sequence[Conversation]) -> list[list[int] | Fault]:
        """Return for each row, whose last turn is the one to be answered, its prompt's ids, or why it has none."""
        asked = [row._replace(messages=(*row.messages, Message("assistant", ANY_ANSWER))) for row in rows]
        rendered = self._prompts.render(asked, "last_response")
        encoded = iter(self._encoder.encode([one[-1] for one in rendered if not isinstance(one, Fault)]))
        return [one if isinstance(one, Fault) else next(encoded).prompt_ids for one in rendered]
