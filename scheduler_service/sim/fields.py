"""Values of the fields of a workload file: each function checks one and returns it as the core has it, or raises
ValueError with a sentence that says what it must be. Which fields there are is in workload.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.probed import Reading
from scheduler_service.core.types import RequestClass

MOST_SECONDS = 1e9  # after the first arrival
MOST_SPREAD = 10.0  # of ln tokens: from one token to 20,000 is one spread
MOST_NUMBER = 1e15


def expected_row(expected: Expected | None) -> dict[str, float]:
    """What `expectation` reads again. Nothing is expected: an empty object."""
    row: dict[str, float] = {}
    if expected is not None and expected.length is not None:
        row |= {"median_tokens": math.exp(expected.length.location), "spread": expected.length.spread}
    if expected is not None and expected.acceptance is not None:
        row["acceptance"] = expected.acceptance
    return {name: round(value, 4) for name, value in row.items()}


def expectation(value: object) -> Expected:
    """`median_tokens` with `spread` (of ln tokens), and `acceptance`, each optional."""
    if not isinstance(value, Mapping) or not all(_is_number(number) and number >= 0 for number in value.values()):
        raise ValueError("must be an object of numbers from 0: median_tokens, spread, acceptance")
    length = None
    if "median_tokens" in value:
        if not (value["median_tokens"] >= 1 and 0 < value.get("spread", 0) <= MOST_SPREAD):
            raise ValueError(f"median_tokens must be at least 1 and come with a spread up to {MOST_SPREAD:g}")
        length = Length(math.log(value["median_tokens"]), value["spread"])
    return Expected(length, value.get("acceptance"))


def readings(value: object) -> tuple[Reading, ...]:
    """Pairs: after how many tokens of output, and the median of those that remain as a probe read it then."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a list")
    found: list[Reading] = []
    for pair in value:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(_is_number(number) for number in pair)):
            raise ValueError(f"{pair!r:.40} is not a pair of numbers: tokens of output, and the median of the rest")
        after, rest = pair
        if not (isinstance(after, int) and after > (found[-1].after if found else 0) and rest > 0):
            raise ValueError(f"{pair!r:.40}: tokens are whole numbers that grow from 1, and the median is above 0")
        found.append(Reading(after, math.log(rest)))
    return tuple(found)


def _is_number(value: object) -> bool:
    """Not NaN, and none so large that logarithms and squares of it overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST_NUMBER <= value <= MOST_NUMBER


def seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS:
        raise ValueError(f"{value!r:.40} is not a number of seconds from 0 to {MOST_SECONDS:g}")
    return float(value)


def whole(low: int, high: int) -> Callable[[object], int]:
    """10.0 is one, too: so tables write a column in which a number is missing."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value % 1:
            raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
        return int(value)

    return parse


def predicted(high: int) -> Callable[[object], int]:
    """A prediction may be a fraction: the nearest whole number counts, and at least 1."""

    def parse(value: object) -> int:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= high:
            raise ValueError(f"{value!r:.40} is not a number above 0 and up to {high}")
        return max(1, round(value))

    return parse


def list_of(parse: Callable[[object], int]) -> Callable[[object], tuple[int, ...]]:
    def parse_all(value: object) -> tuple[int, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{value!r} is not a list")
        return tuple(map(parse, value))

    return parse_all


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    value.encode()  # half a surrogate pair is no text
    return value


def text_tokens(value: object) -> int:
    """Four bytes a token: a simulation needs no tokenizer."""
    return -(-len(text(value).encode()) // 4)


def klass(value: object) -> RequestClass:
    names = [klass.name.lower() for klass in RequestClass]
    if value not in names:
        raise ValueError(f"{value!r} is none of {', '.join(names)}")
    return RequestClass[str(value).upper()]
