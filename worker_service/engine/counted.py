"""How often the tokens of one text occur, which is what penalties need. They are applied in hooks.py."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np


class Counted:
    """Reads of a text that grows only what is new."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len, self._read = prompt_len, 0
        self._places: dict[int, int] = {}  # of each token in the arrays
        self._ids, self._in_prompt, self._in_output = array("i"), array("i"), array("i")

    def rows(self, tokens: Sequence[int], drafts: Sequence[int], first: int, n: int) -> "np.ndarray[Any, Any]":
        """int32 [2 + n, tokens that occur]: their ids, how often they are in the prompt, and how often in the output,
        for each of n rows: after `tokens`, prompt and output, row j follows the first `first + j` of `drafts`."""
        for at in range(self._read, len(tokens)):
            (self._in_prompt if at < self._prompt_len else self._in_output)[self._place(tokens[at])] += 1
        self._read = len(tokens)
        places = [self._place(draft) for draft in drafts[: first + n - 1]]
        rows = np.empty((2 + n, len(self._ids)), np.int32)
        rows[0], rows[1], rows[2:] = self._ids, self._in_prompt, self._in_output
        for i, place in enumerate(places):
            rows[2 + max(i + 1 - first, 0) :, place] += 1
        return rows

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._in_prompt.append(0)
            self._in_output.append(0)
        return place
