"""Drawing an exact number of rows with a seed, in constant memory and in the order of the rows."""

import random


class Draw:
    """Decides row by row which are chosen: exactly the number asked for, each set of them equally likely.

    Selection sampling (Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S). Every ordinal has a
    random number of its own, so a row that is left out of the candidates hardly moves the others.
    """

    def __init__(self, num_rows: int, num_wanted: int, seed: int | str) -> None:
        self._random = random.Random(seed)
        self._num_left = num_rows
        self._num_wanted = num_wanted
        self._next_ordinal = 0
        self._last = (-1, False)

    def draw(self, ordinal: int) -> bool:
        """Return whether a row is chosen. Rows come in the order of their ordinals; equal ones share their fate."""
        if ordinal == self._last[0]:
            return self._last[1]
        number = 0.0
        while self._next_ordinal <= ordinal:
            number = self._random.random()
            self._next_ordinal += 1
        chosen = self._num_left * number < self._num_wanted
        self._num_left -= 1
        self._num_wanted -= chosen
        self._last = (ordinal, chosen)
        return chosen
