"""Markdown of tables. Which tables there are is not known here.

Cells stand close together, without spaces around their borders: the pages have a bound on their words.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(headings), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"|{'|'.join(cell.replace('|', '&#124;') for cell in line)}|\n" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def default_of(value: Any) -> str:
    """A default, as it would be typed; empty where there is none, or an empty one."""
    match value:
        case None | () | [] | "" | dict():
            return ""
        case Enum():
            return code(str(value.value))
        case bool():
            return code(str(value).lower())
        case list() | tuple():
            return code(",".join(map(str, value)))
        case float():
            return code(f"{value:g}")
    return code(str(value))
