"""One worker's session: its messages checked and made edits, and what it is to be told. Bounds are here. No model, no
transport, no clock."""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import BadInput
from protos.link.v1 import draft_link_pb2 as pb
from worker_service.drafting.computing import Edit
from worker_service.drafting.texts import Guess, Wish

LONGEST_CHAIN, WIDEST_FAN = 32, 4
SALT_BYTES = range(16, 65)
FULL_BYTES = 32 << 10  # a message with so much gets no further handle: with all branches of one it stays below 64 KiB


@dataclass(frozen=True, slots=True)
class Bounds:
    """`handles` and `tokens` (of all texts together): of one session."""

    context_tokens: int
    vocab_size: int
    handles: int
    tokens: int


class Session:
    """What a worker has said, in numbers alone: its texts are with the model's thread."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lengths: dict[int, int] = {}  # of the texts, by handle
        self._highest = 0
        self._tokens = 0
        self._owed: dict[int, dict[int, pb.Chain]] = {}  # not sent yet: by handle, the newest of each place

    def read(self, truths: pb.Truths) -> list[Edit]:
        """What the model's thread is to know of it. Raises BadInput."""
        if len(truths.rows) > 2 * self._bounds.handles:  # as many may be over as there are
            raise BadInput("rows", f"{len(truths.rows)}; a message has at most {2 * self._bounds.handles}")
        if len(self._owed) > 2 * self._bounds.handles:
            raise BadInput("rows", "come faster than what they bring about is read")
        return [edit for row in truths.rows if (edit := self._read(row)) is not None]

    def _read(self, row: pb.Truth) -> Edit | None:
        handle = row.handle
        if row.forget:
            if not 0 < handle <= self._highest:
                raise BadInput("handle", f"{handle} never was one of this session")
            return self._drop(handle)
        if handle not in self._lengths:
            if 0 < handle <= self._highest:
                return None  # it was told that this one is forgotten
            self._open(row)
        known, end = self._lengths[handle], row.start + len(row.tokens)
        self._check(row, end)
        if row.start > known:
            self._owe(pb.Chain(handle=handle, at=known, standing=pb.STANDING_SEND))
            return None
        self._lengths[handle] = end
        self._tokens += end - known
        if self._tokens > self._bounds.tokens:
            edit = self._drop(handle)
            self._owe(pb.Chain(handle=handle, standing=pb.STANDING_FULL))
            return edit
        wish = Wish(row.need, row.ahead, row.fan, row.depth)
        # Without a salt it shares with none.
        return Edit(handle, row.start, array("i", row.tokens), wish, (row.salt or secrets.token_bytes()).hex())

    def _open(self, row: pb.Truth) -> None:
        if not row.handle:
            raise BadInput("handle", "counts from 1")
        if row.start:
            raise BadInput("handle", f"{row.handle} never was one of this session, and its text begins at {row.start}")
        if len(self._lengths) == self._bounds.handles:
            raise BadInput(
                "handle", f"{row.handle} is one more than the {self._bounds.handles} that a session may have"
            )
        if row.salt and len(row.salt) not in SALT_BYTES:
            raise BadInput(
                "salt", f"has {len(row.salt)} bytes; it may have {SALT_BYTES[0]} to {SALT_BYTES[-1]}, or none"
            )
        self._highest, self._lengths[row.handle] = row.handle, 0

    def _check(self, row: pb.Truth, end: int) -> None:
        bounds = self._bounds
        if end > bounds.context_tokens:
            raise BadInput("tokens", f"handle {row.handle} has {end}; the context is {bounds.context_tokens}")
        if row.tokens and max(row.tokens) >= bounds.vocab_size:
            raise BadInput("tokens", f"handle {row.handle} has an id that is not below {bounds.vocab_size}")
        if not row.need <= row.ahead <= LONGEST_CHAIN or row.depth > LONGEST_CHAIN:
            raise BadInput("ahead", f"must be need to {LONGEST_CHAIN}, and depth at most that")
        if row.fan > WIDEST_FAN:
            raise BadInput("fan", f"is {row.fan}, at most {WIDEST_FAN}")

    def _drop(self, handle: int) -> Edit | None:
        """None: it is not there any more."""
        self._owed.pop(handle, None)
        length = self._lengths.pop(handle, None)
        if length is None:
            return None
        self._tokens -= length
        return Edit(handle)

    # ---- what it is told ----

    def take(self, handle: int, guess: Guess) -> None:
        """A guess for it. Those that it replaces, or that are older than the text's newest main chain, are dropped."""
        if handle not in self._lengths:
            return
        chain = pb.Chain(handle=handle, at=guess.at, prefix=guess.prefix, tokens=guess.tokens)
        if guess.branch:
            self._owed.setdefault(handle, {})[_place(guess)] = chain
            return
        kept = {place: each for place, each in self._owed.pop(handle, {}).items() if place and each.at >= guess.at}
        self._owed[handle] = {0: chain, **kept}

    def _owe(self, standing: pb.Chain) -> None:
        self._owed[standing.handle] = {0: standing}

    @property
    def owes(self) -> bool:
        return bool(self._owed)

    def send(self) -> Sequence[pb.Chain]:
        """What it has not been told, as much as goes into one message. It counts as told now."""
        chains: list[pb.Chain] = []
        size = 0
        while self._owed and size < FULL_BYTES:
            more = self._owed.pop(next(iter(self._owed))).values()
            size += sum(chain.ByteSize() for chain in more)
            chains += more
        return chains


def _place(guess: Guess) -> int:
    """Of a branch among those of its handle; 0 is the main chain."""
    return 1 + (guess.at << 32 | guess.tokens[0])
