"""Finds variables of the environment whose names are nearly those of settings. Reads no setting."""

import os
from collections.abc import Collection
from difflib import get_close_matches

_ALIKE = 0.8  # by difflib: of five letters one is wrong or missing


def refuse_misspelt(prefix: str, names: Collection[str], others: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a variable with this prefix is none of the settings `names` and nearly one of them. What is
    like none of them is left alone, for it may be somebody else's: Kubernetes makes variables for each Service. So is
    what begins with one of `others` behind the prefix."""
    known = {name.upper() for name in names}
    for variable in sorted(map(str.upper, os.environ)):
        name = variable.removeprefix(prefix)
        if not variable.startswith(prefix) or name in known or name.startswith(others):
            continue
        if meant := get_close_matches(name, known, 1, _ALIKE):
            raise ValueError(f"{variable} is no setting; did you mean {prefix}{meant[0]}?")
