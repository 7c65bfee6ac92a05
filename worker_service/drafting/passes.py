"""The small model's forward passes: which lines of which texts are computed together, and what follows them. Not
thread-safe, and no clock but for what a pass costs."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import torch

from worker_service.drafting.texts import Guess, Line, Name, Text, Texts
from worker_service.engine.kv import KV
from worker_service.engine.target import InputSequence, Target

CATCH_UP_TOKENS = 256  # of texts, in a pass: a long prompt must not hold up those who only want the next guess
_REHEARSED = 5  # passes of each kind that are timed


class Passes:
    """Continues texts greedily: a token a pass for each line that has a place in it."""

    def __init__(
        self, model: Target, *, context_tokens: int, blocks: int, block_tokens: int, lines: int, fan: int
    ) -> None:
        """`context_tokens`: that the model allows. `blocks` of `block_tokens` tokens are the KV memory. `lines`: in one
        pass at most. `fan`: likeliest tokens that are looked at. Raises what Target.new_pool does."""
        self._model, self._lines, self._fan = model, lines, fan
        self.vocab_size = model.vocab_size
        # A single text always fits, for the others' KV goes first.
        self.context_tokens = min(context_tokens, blocks * block_tokens)
        self.texts = Texts(self._model.new_pool(blocks, block_tokens), self.context_tokens)
        self.guessed = self.caught_up = 0  # tokens, so far

    @torch.inference_mode()
    def run(self) -> list[tuple[Name, Guess]] | None:
        """One pass, and what is to be told after it. None: there is nothing to compute, or no room for it."""
        chosen = list(self._chosen())
        if not chosen:
            return None
        logits = self._model.forward([sequence for _, _, sequence in chosen]).logits
        whole = [(text, line) for text, line, sequence in chosen if sequence.logits_from < len(sequence.tokens)]
        told = []
        for (text, line), likeliest in zip(whole, logits.topk(self._fan).indices.tolist(), strict=True):
            guess = self.texts.grow(text, line, likeliest)
            if guess is not None:
                told.append((text.name, guess))
        for text, line, sequence in chosen:
            if line is text.main and len(sequence.tokens) > 1:
                line.kv.publish(line.tokens[: text.length])
        self.guessed += len(whole)
        self.caught_up += sum(len(sequence.tokens) for _, _, sequence in chosen) - len(whole)
        return told

    def _chosen(self) -> Iterator[tuple[Text, Line, InputSequence]]:
        """What the next pass computes. Its KV has room for it."""
        order, budget, taken = self.texts.wanted(), CATCH_UP_TOKENS, 0
        for place, (text, line) in enumerate(order):
            if line.missing > 1:
                line.kv.adopt(line.tokens[: text.length])
            start, missing = line.kv.length, line.missing
            tokens = line.tokens[start : start + (missing if missing == 1 else min(missing, budget))]
            if not tokens or not self.texts.make_room(line, len(tokens), order, place):
                continue
            budget -= len(tokens) - 1
            line.kv.extend(len(tokens))
            guesses = line.grows and line.kv.length == len(line.tokens)
            yield text, line, InputSequence(line.kv, start, tokens, len(tokens) - guesses)
            taken += 1
            if taken == self._lines:
                return

    @torch.inference_mode()
    def cost(self) -> tuple[float, float]:
        """Seconds of one token of one line, and of each further line of a pass. Nothing is kept."""
        several = max(2, min(self._lines, 8, self.texts.pool.free_blocks))
        one_s, several_s = (self._timed(lines) for lines in (1, several))
        return one_s, max(several_s - one_s, 0.0) / (several - 1)

    def _timed(self, lines: int) -> float:
        took_s = []
        for _ in range(_REHEARSED):
            caches = [KV(self.texts.pool) for _ in range(lines)]
            for kv in caches:
                kv.extend(1)
            begun = perf_counter()
            logits = self._model.forward([InputSequence(kv, 0, [0], 0) for kv in caches]).logits
            logits.topk(self._fan).indices.tolist()
            took_s.append(perf_counter() - begun)
            for kv in caches:
                kv.release()
        return median(took_s)
