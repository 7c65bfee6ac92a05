"""`python -m gateway.grammars`: compiles grammars, one a line, and says what is wrong with each. gateway/structure.py
starts it, in a process of its own: some small grammars take llguidance minutes, gigabytes or the whole stack, and
nothing stops a thread."""

import json
import math
import random
import re
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_BYTES = 4 << 30
STACK_BYTES = 1 << 20  # half of what llguidance's own threads have in a worker
ERROR_CHARS = 1000  # errors quote the grammar
CPU_S = 2  # for one grammar; the kernel ends the process at the next whole second
WALK_TOKENS = 24
MASK_S = 0.5  # of CPU, for the mask of one of them; ordinary ones take milliseconds
# llguidance's limits, as in the workers (worker_service/engine/structure.py).
MASK_ITEMS = 20_000
LEXER_STATES = 50_000
SLOW = "takes too much time for each token"
IMPOSSIBLE = "no text can have this structure"
_BAD_REGEX = re.compile(r"invalid regex (\"[^\n]*\") \(in regex\):.*\nerror: ([^\n]+)", re.DOTALL)


def problem(tokenizer: LLTokenizer, grammar: str) -> str:
    """The problem with it; empty if there is none. A text is drawn from it too: some trouble shows in masks alone."""
    limits = LLParserLimits(step_max_items=MASK_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    chosen = random.Random(0)
    for _ in range(WALK_TOKENS):
        if matcher.is_stopped():
            break
        begun = time.process_time()
        words = memoryview(matcher.compute_bitmask()).cast("I")
        if matcher.is_error():
            break
        if time.process_time() - begun > MASK_S:
            return SLOW
        allowed = sum(map(int.bit_count, words))
        if not allowed:
            return IMPOSSIBLE
        matcher.consume_token(nth_bit(words, chosen.randrange(allowed)))
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        return IMPOSSIBLE
    if found := _BAD_REGEX.search(error):  # the rest shows places in a grammar that nobody wrote
        error = f"invalid regex: {found[2]}, in {found[1]}"
    return " ".join(error.removesuffix("<non-verbose/>").split())[:ERROR_CHARS]


def nth_bit(words: Sequence[int], n: int) -> int:
    """The position of the set bit with `n` set ones before it, of words of 32 bits, the lowest bit of each first."""
    for i, word in enumerate(words):
        if n < word.bit_count():
            for _ in range(n):
                word &= word - 1  # without its lowest set bit
            return 32 * i + (word & -word).bit_length() - 1
        n -= word.bit_count()
    raise IndexError(n)


def main() -> None:
    """The first line describes the model; each line after it is a grammar. Each is answered by a line."""
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    model = json.loads(sys.stdin.readline())
    try:
        tokenizer = LLTokenizer(model["tokenizer"], n_vocab=model["vocab_size"], eos_token=model["eos_ids"] or None)
    except Exception as error:
        _answer(f"llguidance cannot use this model's tokenizer: {error}")
        return
    _answer("")
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_S)
        _answer(problem(tokenizer, json.loads(line)))


def _limit(what: int, value: int) -> None:
    """Where the system takes no such limit, as macOS takes none of memory, there is none: the gateway still ends a
    compiler that does not answer."""
    _, most = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _answer(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
