"""Structured output: which tokens a request's grammar allows at each position, and which it forces. Nothing is drawn or
masked here: hooks.py does that.

Grammars are llguidance's (https://github.com/guidance-ai/llguidance). What a matcher says follows from the output's
tokens alone, so a request can be rebuilt anywhere. A matcher is therefore only ever given tokens that count; drafts are
tried on copies of it. Rolling back is not an option: after a rollback llguidance 1.9 allows other tokens than before
where a grammar is ambiguous, and the text would depend on the drafts.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:  # loaded where there are grammars: an engine without them needs no llguidance
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

from worker_service.engine.beside import Helper, beside

COMPILE_S = 15.0  # the gateway has refused whatever takes more than a fraction of this
MASKS_S = 5.0  # of one step; llguidance bounds its own work to some 20 ms a mask
_KEPT = 64  # compiled grammars
_THREADS = 4  # at most, for the masks of a step
_LEXER_STATES = 50_000  # at most, of 1 to 2 kB each
_LARGE = 100_000  # tokens: of more it takes seconds to make llguidance's tokenizer, and no other thread runs meanwhile


class StructureError(Exception):
    """A request's grammar cannot be followed; the message says why. It ends that request alone."""


class Matcher:
    """How far the output of one request has come in its grammar. All that native code raises is caught: a panic is no
    Exception, and would end the worker."""

    def __init__(self, building: "Future[LLMatcher]", eos_ids: frozenset[int]) -> None:
        self._building, self._eos_ids, self._due = building, eos_ids, monotonic() + COMPILE_S
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
            raise StructureError(f"structure: {_said(error)}") from error

    def push(self, token: int) -> bool:
        """Add a token of output; returns whether the structure is complete and can go no further."""
        self._trial = None
        if not self._follows:
            return False
        try:
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
        with suppress(BaseException):
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
        with suppress(BaseException):
            trial, self._trial = self._trial or self.copy(), None
            kept = text[: trial.try_consume_tokens(text)]
            return (kept + trial.compute_ff_tokens() if kept else kept)[:limit]
        return []

    @property
    def _follows(self) -> bool:
        """Whether it is compiled and nothing is wrong with it. What is wrong is told by the masks."""
        done = self._building.done()
        return done and self._building.exception() is None and not self._building.result().is_error()

    def _own(self) -> "LLMatcher":
        if self._built is None:
            self._built = self._result()
        if self._built.is_error():
            raise StructureError(f"structure: {self._built.get_error()}")
        return self._built

    def _result(self) -> "LLMatcher":
        try:
            return self._building.result(max(self._due - monotonic(), 0))
        except TimeoutError:
            raise StructureError(f"structure: its grammar was not compiled within {COMPILE_S:g} s") from None
        except BaseException as error:  # a panic of native code is no Exception
            raise StructureError(f"structure: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """Never nothing: that of a time-out has no words."""
    return str(error) or type(error).__name__


class Asked(NamedTuple):
    """The masks that one request needs for a round: one for the position after its tokens and one after each draft."""

    matcher: Matcher
    drafts: Sequence[int]


class Mask(NamedTuple):
    """`bits`: uint8 [drafts + 1, bytes], a bit for each token, the least significant ones first, set where it is
    allowed. `few`: as `few_allowed` says, of each of these rows; empty where nobody looked."""

    bits: torch.Tensor
    few: Sequence[torch.Tensor | None] = ()


Masks: TypeAlias = dict[str, Mask | StructureError]  # by request; or why there is none


class MaskMaker:
    """A thread that makes masks, and what it alone writes to; given up as a whole where it does not answer."""

    def __init__(self, words: int, few_of: int) -> None:
        """`words`: 32 bits each, of one mask. `few_of`: the vocabulary of which few tokens are looked for; 0: none."""
        self.helper = Helper()
        self._words, self._few_of = words, few_of
        self._executor: LLExecutor | None = None  # its threads are the helper's
        self._bits = np.empty((0, words), np.int32)  # grows to the largest step

    def begin(self, asked: Mapping[str, Asked]) -> "Future[Masks]":
        return self.helper.begin(partial(self._masks, dict(asked)))

    def _masks(self, asked: dict[str, Asked]) -> Masks:
        result: Masks = {}
        trials: dict[str, tuple[LLMatcher, int, list[int]]] = {}
        rows = 0
        for name, (matcher, drafts) in asked.items():
            try:
                trials[name] = matcher.copy(), rows, list(drafts)
                rows += len(drafts) + 1
            except StructureError as error:
                result[name] = error
        if rows > len(self._bits):
            self._bits = np.empty((rows, self._words), np.int32)
        try:
            self._fill(list(trials.values()), rows)
        except BaseException:  # of one of them; nobody knows which
            for name, (_, row, drafts) in list(trials.items()):
                try:
                    trials[name] = asked[name].matcher.copy(), row, drafts
                    self._fill([trials[name]], rows)
                except BaseException as error:
                    del trials[name]
                    result[name] = StructureError(f"structure: its masks failed: {_said(error)}")
        few = few_allowed(self._bits[:rows], self._few_of) if self._few_of else ()
        masks = torch.from_numpy(self._bits[:rows].view(np.uint8))
        for name, (trial, begin, drafts) in trials.items():
            own = slice(begin, begin + len(drafts) + 1)
            failed = trial.is_error()
            result[name] = StructureError(f"structure: {trial.get_error()}") if failed else Mask(masks[own], few[own])
        return result

    def _fill(self, trials: "Sequence[tuple[LLMatcher, int, list[int]]]", rows: int) -> None:
        """Write the bits of what is allowed. Beyond a draft that a mask forbids nothing is written, or ever read."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(_THREADS, os.cpu_count() or 1))
        place = self._bits.ctypes.data, 4 * self._words, rows
        if drafting := [trial for trial in trials if trial[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *place)
        if plain := [(trial, row) for trial, row, drafts in trials if not drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *place)


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


class Structures:
    """The grammars of one engine's requests. They are compiled, and masks are made, beside the model's thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], *, few: bool = True) -> None:
        """`tokenizer`: of the tokenizers library. `vocab_size`: the width of logits, which may exceed its tokens.
        `few`: whether masks tell where few tokens are allowed; logits on a device are masked all at once."""
        self._vocab_size, self._eos_ids, self._model_tokenizer = vocab_size, eos_ids, tokenizer
        self._new_maker = partial(MaskMaker, -(-self._width // 32), vocab_size if few else 0)
        self._maker = self._new_maker()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        if self._width > _LARGE:
            self._tokenizer.exception()  # what is wrong with it is told by the first grammar

    @property
    def _width(self) -> int:
        return max(self._vocab_size, int(self._model_tokenizer.get_vocab_size()))

    @cached_property
    def _tokenizer(self) -> "Future[LLTokenizer]":
        """Begun with the first grammar, unless the vocabulary is large: it takes a tenth of all that is done before a
        worker serves, would disturb the measurement of what steps cost, and no request may ever ask for it."""
        return beside(partial(_tokenizer, self._model_tokenizer, self._width, sorted(self._eos_ids)))

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Begin to compile, if no request has had that grammar, and to follow the tokens that exist."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None or (compiled.done() and compiled.exception()):
            compiled = beside(partial(self._build, self._tokenizer, grammar))
        self._compiled[grammar] = compiled
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return Matcher(beside(partial(_following, compiled, list(output))), self._eos_ids)

    def _build(self, made: "Future[LLTokenizer]", grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            tokenizer = made.result(COMPILE_S)
        except Exception as error:  # of a kind that llguidance does not know: all other requests are served
            raise StructureError(f"llguidance cannot use this model's tokenizer: {_said(error)}") from None
        limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)

    def begin(self, asked: Mapping[str, Asked]) -> "Future[Masks]":
        """Compute the masks of a step, of requests by name; they do not depend on the forward pass."""
        return self._maker.begin(asked)

    def take(self, masks: "Future[Masks]", asked: Mapping[str, Asked]) -> Masks:
        """The masks that `begin` began. They can be used until the next step begins."""
        waits_for_grammars = not all(each.matcher.ready for each in asked.values())
        try:
            return masks.result(MASKS_S + COMPILE_S * waits_for_grammars)
        except BaseException as error:  # a panic of native code is no Exception
            # The work may still go on, and write: it keeps what it writes to, and the next steps get another maker.
            self._maker.helper.abandon()
            self._maker = self._new_maker()
            problem = StructureError(f"structure: the masks of this step failed: {_said(error)}")
            return dict.fromkeys(asked, problem)


def _following(compiled: "Future[LLMatcher]", output: list[int]) -> "LLMatcher":
    matcher = compiled.result(COMPILE_S).deep_copy()
    matcher.consume_tokens(output)
    return matcher


def _tokenizer(tokenizer: Any, size: int, eos_ids: list[int]) -> "LLTokenizer":
    """llguidance's form of it, without truncation or padding."""
    from llguidance import LLTokenizer

    text = json.dumps(json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None})
    return LLTokenizer(text, n_vocab=size, eos_token=eos_ids or None)
