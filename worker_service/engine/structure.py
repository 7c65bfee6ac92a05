"""Structured output: which tokens the requests' grammars allow at each position. Grammars are compiled, and masks are
made, beside the model's thread. Nothing is drawn or masked here: hooks.py does that.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:  # loaded where there are grammars: an engine without them needs no llguidance
    from llguidance import LLMatcher, LLTokenizer

from worker_service.engine.beside import Helper, beside
from worker_service.engine.matcher import COMPILE_S, Compiled, Mask, Matcher, StructureError, said

MASKS_S = 5.0  # of one request in one step, on a busy machine; their CPU time is bounded by the matcher
# llguidance's limits, as in gateway/grammars.py.
MASK_ITEMS = 20_000  # for a mask: ordinary grammars need up to 8,000; an ambiguous one may take a second of CPU
LEXER_STATES = 50_000  # of 1 to 2 kB each
_KEPT = 64  # compiled grammars
_LARGE = 100_000  # tokens: of more it takes seconds to make llguidance's tokenizer, and no other thread runs meanwhile


class Asked(NamedTuple):
    """The masks that one request needs for a round: one for the position after its tokens and one after each draft."""

    matcher: Matcher
    drafts: Sequence[int]


Masks: TypeAlias = dict[str, Mask | StructureError]  # by request; or why there is none


class Making(NamedTuple):
    """Masks of one request that are being made, and the thread that makes them."""

    masks: "Future[Mask]"
    helper: Helper


class Structures:
    """The grammars of one engine's requests. They are compiled, and masks are made, beside the model's thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], *, few: bool = True) -> None:
        """`tokenizer`: of the tokenizers library. `vocab_size`: the width of logits, which may exceed its tokens.
        `few`: whether masks tell where few tokens are allowed; logits on a device are masked all at once."""
        self._eos_ids, self._model_tokenizer = eos_ids, tokenizer
        self._width = max(vocab_size, int(tokenizer.get_vocab_size()))
        self._few_of = vocab_size if few else 0
        self._idle: list[Helper] = []  # as many as made masks at a time
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        if self._width > _LARGE:
            self._tokenizer.exception()  # what is wrong with it is told by the first grammar

    @cached_property
    def _tokenizer(self) -> "Future[LLTokenizer]":
        """Begun with the first grammar, unless the vocabulary is large: it takes a tenth of all that is done before a
        worker serves, would disturb the measurement of what steps cost, and no request may ever ask for it."""
        return beside(partial(_tokenizer, self._model_tokenizer, self._width, sorted(self._eos_ids)))

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Begin to compile, if no request has had that grammar, and to follow the tokens that exist."""
        return Matcher(self._grammar(grammar), output, self._eos_ids, partial(self._grammar, grammar))

    def _grammar(self, text: str, spent: Compiled | None = None) -> Compiled:
        """It as the last request had it, unless that is `spent` or could not be compiled; else compiled anew. Threads
        that make masks ask for it, too."""
        compiled = self._compiled.pop(text, None)
        if compiled is None or compiled is spent or (compiled.done() and compiled.exception()):
            compiled = beside(partial(self._build, self._tokenizer, text))
        self._compiled[text] = compiled
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return compiled

    def _build(self, made: "Future[LLTokenizer]", grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            tokenizer = made.result(COMPILE_S)
        except Exception as error:  # of a kind that llguidance does not know: all other requests are served
            raise StructureError(f"llguidance cannot use this model's tokenizer: {said(error)}") from None
        limits = LLParserLimits(step_max_items=MASK_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False)
        return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)

    def begin(self, asked: Mapping[str, Asked]) -> dict[str, Making]:
        """Compute the masks of a step, of requests by name; they do not depend on the forward pass. Each request has a
        thread, so that it waits for nobody else's."""
        return {name: self._begin(each) for name, each in asked.items()}

    def _begin(self, asked: Asked) -> Making:
        helper = self._idle.pop() if self._idle else Helper()
        drafts, words = list(asked.drafts), -(-self._width // 32)
        return Making(helper.begin(partial(asked.matcher.masks, drafts, words, self._few_of)), helper)

    def take(self, making: Mapping[str, Making], asked: Mapping[str, Asked]) -> Masks:
        """The masks that `begin` began."""
        begun = monotonic()
        due = {name: begun + MASKS_S + COMPILE_S * (not each.matcher.ready) for name, each in asked.items()}
        return {name: self._take(each, due[name]) for name, each in making.items()}

    def _take(self, making: Making, due: float) -> Mask | StructureError:
        try:
            mask: Mask | StructureError = making.masks.result(max(due - monotonic(), 0))
        except StructureError as error:
            mask = error
        except TimeoutError:  # perhaps the machine is busy: nothing says that it is the grammar
            making.helper.abandon()
            return StructureError(f"the masks of its structure were not made within {MASKS_S:g} s")
        except BaseException as error:  # a panic of native code is no Exception
            making.helper.abandon()
            return StructureError(f"structure: its masks failed: {said(error)}")
        self._idle.append(making.helper)
        return mask


def _tokenizer(tokenizer: Any, size: int, eos_ids: list[int]) -> "LLTokenizer":
    """llguidance's form of it, without truncation or padding."""
    from llguidance import LLTokenizer

    text = json.dumps(json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None})
    return LLTokenizer(text, n_vocab=size, eos_token=eos_ids or None)
