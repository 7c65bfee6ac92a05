"""How far one request has come in its grammar, and the masks for what may follow. Which requests there are is not known
here.

Grammars are llguidance's (https://github.com/guidance-ai/llguidance). What a matcher says follows from the output's
tokens alone, so a request can be rebuilt anywhere. A matcher is therefore only ever given tokens that count; drafts are
tried on copies of it. Rolling back is not an option: after a rollback llguidance 1.9 allows other tokens than before
where a grammar is ambiguous, and the text would depend on the drafts.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:  # loaded where there are grammars: an engine without them needs no llguidance
    from llguidance import LLMatcher

from worker_service.engine.beside import beside

COMPILE_S = 15.0  # the gateway has refused whatever takes more than a fraction of this
MASK_S = 0.02  # of CPU that a mask, and what follows its token, may take on average: ten times what ordinary ones do
SPARE_S = 1.0  # of CPU that a request may take beyond that

_SPENT = "lexer error: too many states"  # as llguidance says it

Compiled: TypeAlias = Future["LLMatcher"]
Again: TypeAlias = Callable[[Compiled], Compiled]


class StructureError(Exception):
    """A request's grammar cannot be followed; the message says why. It ends that request alone."""


class LexerSpentError(StructureError):
    """The lexer that it shares with others has all the states that it may have."""


class Mask(NamedTuple):
    """`bits`: uint8 [drafts + 1, bytes], a bit for each token, the least significant ones first, set where it is
    allowed. `few`: as `few_allowed` says, of each of these rows; empty where nobody looked."""

    bits: torch.Tensor
    few: Sequence[torch.Tensor | None] = ()


class Matcher:
    """How far the output of one request has come in its grammar. All that native code raises is caught: a panic is no
    Exception, and would end the worker.

    Copies of a matcher share its lexer, whose states are bounded: other outputs may have used them up. So one whose
    lexer is spent begins once more, on a grammar that is compiled anew."""

    def __init__(self, compiled: Compiled, output: Sequence[int], eos_ids: frozenset[int], again: Again) -> None:
        """`again`: compiles the grammar anew, in place of this one whose lexer is spent."""
        self._output, self._eos_ids = list(output), eos_ids
        self._again: Again | None = again  # None: that was done
        self._spare_s = SPARE_S  # below 0: it ends with the next masks
        self._begin(compiled)

    def _begin(self, compiled: Compiled) -> None:
        self._compiled, self._due = compiled, monotonic() + COMPILE_S
        self._building = beside(partial(_following, compiled, list(self._output)))
        self._built: LLMatcher | None = None
        self._trial: LLMatcher | None = None  # a copy of its present state, which no token was tried on

    @property
    def ready(self) -> bool:
        """Whether its grammar is compiled, or has taken too long, so that nothing below waits."""
        return self._building.done() or monotonic() >= self._due

    def copy(self) -> "LLMatcher":
        """Of its state, to try tokens on. Waits until its grammar is compiled. Raises StructureError."""
        try:
            return self._own().deep_copy()
        except StructureError:
            raise
        except BaseException as error:
            raise StructureError(f"structure: {said(error)}") from error

    def push(self, token: int) -> bool:
        """Add a token of output; returns whether the structure is complete and can go no further."""
        self._trial = None
        self._output.append(token)
        if not self._follows:
            return False
        try:
            with self._paid():
                matcher = self._own()
                return matcher.consume_token(token) and matcher.is_stopped()
        except BaseException as error:  # told by the next masks
            self._building, self._built = Future(), None
            self._building.set_exception(error)
            return False

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that come next whatever the model prefers."""
        if not self._follows:
            return []
        with suppress(BaseException), self._paid():
            self._trial = self.copy()
            return self._trial.compute_ff_tokens()[:limit]
        self._trial = None
        return []

    def prune(self, drafts: Sequence[int], limit: int) -> list[int]:
        """The drafts before the first one that the grammar forbids or that ends the output, and then the tokens that
        they force: at most `limit` in all."""
        if not self._follows:
            return []
        text = list(takewhile(lambda token: token not in self._eos_ids, drafts))
        with suppress(BaseException), self._paid():
            trial, self._trial = self._trial or self.copy(), None
            kept = text[: trial.try_consume_tokens(text)]
            return (kept + trial.compute_ff_tokens() if kept else kept)[:limit]
        return []

    def masks(self, drafts: Sequence[int], words: int, few_of: int) -> Mask:
        """Those for the position after its tokens and after each draft, of `words` of 32 bits each; `few_of`: the
        vocabulary of which few tokens are looked for, 0: none. Raises StructureError. For a thread in which nothing
        else waits: it may compile the grammar again."""
        self._spare_s = min(self._spare_s + MASK_S * (len(drafts) + 1), SPARE_S)
        try:
            bits = self._bits(drafts, words)
        except LexerSpentError:
            again, self._again = self._again, None
            if again is None:
                raise
            self._begin(again(self._compiled))
            bits = self._bits(drafts, words)
        if self._spare_s < 0:
            raise StructureError("structure: its grammar takes too much time for each token")
        few = few_allowed(bits, few_of) if few_of else ()
        return Mask(torch.from_numpy(bits.view(np.uint8)), few)

    def _bits(self, drafts: Sequence[int], words: int) -> "np.ndarray[Any, Any]":
        """int32 [drafts + 1, words]. Behind a draft that is forbidden nothing is written, or ever read."""
        trial, bits = self.copy(), np.empty((len(drafts) + 1, words), np.int32)
        try:
            with self._paid():
                for row, draft in zip(bits, [*drafts, None], strict=True):
                    trial.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                    if draft is None or not trial.try_consume_tokens([draft]):
                        break
        except BaseException as error:
            raise StructureError(f"structure: its masks failed: {said(error)}") from error
        if trial.is_error():
            raise _problem(trial)
        return bits

    @contextmanager
    def _paid(self) -> Iterator[None]:
        """The CPU time of what is done within is the request's."""
        begun = thread_time()
        try:
            yield
        finally:
            self._spare_s -= thread_time() - begun

    @property
    def _follows(self) -> bool:
        """Whether it is compiled and nothing is wrong with it. What is wrong is told by the masks."""
        done = self._building.done()
        return done and self._building.exception() is None and not self._building.result().is_error()

    def _own(self) -> "LLMatcher":
        if self._built is None:
            self._built = self._result()
        if self._built.is_error():
            raise _problem(self._built)
        return self._built

    def _result(self) -> "LLMatcher":
        try:
            return self._building.result(max(self._due - monotonic(), 0))
        except TimeoutError:
            raise StructureError(f"the grammar of its structure was not compiled within {COMPILE_S:g} s") from None
        except BaseException as error:  # a panic of native code is no Exception
            raise StructureError(f"structure: {said(error)}") from error


def _problem(matcher: "LLMatcher") -> StructureError:
    """Of one that is in an error."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return (LexerSpentError if text.startswith(_SPENT) else StructureError)(f"structure: {text}")


def said(error: BaseException) -> str:
    """Never nothing: that of a time-out has no words."""
    return str(error) or type(error).__name__


def few_allowed(words: "np.ndarray[Any, Any]", vocabulary: int) -> list[torch.Tensor | None]:
    """Of masks, int32 [n, words] with a bit for each token, the tokens that each allows: int64, in order. None where
    they may be many. An eighth of the words then says all, and of the logits only these tokens' need be read."""
    some = words != 0
    few = np.add.reduce(some, axis=1, dtype=np.int32) <= words.shape[1] // 8
    some &= few[:, None]
    places = np.flatnonzero(some)  # of all masks as one: numpy takes ten times as long to say rows, too
    bits = np.flatnonzero(np.unpackbits(words.reshape(-1)[places].view(np.uint8), bitorder="little"))
    rows, tokens = np.divmod(places[bits >> 5] * 32 + (bits & 31), 32 * words.shape[1])
    real = tokens < vocabulary
    found = torch.from_numpy(tokens[real])
    ends = np.searchsorted(rows[real], np.arange(len(words) + 1)).tolist()
    return [found[ends[i] : ends[i + 1]] if each else None for i, each in enumerate(few.tolist())]


def _following(compiled: Compiled, output: list[int]) -> "LLMatcher":
    matcher = compiled.result(COMPILE_S).deep_copy()
    matcher.consume_tokens(output)
    return matcher
