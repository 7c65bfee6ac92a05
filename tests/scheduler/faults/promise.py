"""The checker: what docs/explanation/reliability.md promises, held against what clients saw and what the store has."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.v1 import types_pb2
from scheduler_service.core.lifecycle import State
from scheduler_service.store import MemoryStore, Stored
from scheduler_service.store.rounds import decode
from tests.scheduler.faults.model import answer


@dataclass
class Kept:
    """Of a request, the most that was ever durable."""

    arrival: float
    tokens: list[int]
    ending: bytes | None = None
    heard: bool = False  # a commit with it was answered, or a leader has read it


class Promise:
    """Every accepted request ends exactly once, with every token exactly once and in order, or with a clear error."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.broken: list[str] = []
        self.excused = False  # the store lost what it had acknowledged, and the leader who knew it is gone, too
        self.worker_losses = 0  # faults that took a worker away, or its link
        self.kept: dict[str, Kept] = {}
        self._seen: Mapping[str, Stored] = {}
        self._now = now

    def violated(self, what: str) -> None:
        self.broken.append(f"{self._now():.4f} {what}")

    # ---- what the store is given ----

    def written(self, store: MemoryStore) -> None:
        """After each write: all that it holds was written by the model, in order, and never after its end."""
        held = store.requests
        for id, stored in held.items():
            if self._seen.get(id) is not stored:
                self._changed(id, stored)
        self._seen = held

    def _changed(self, id: str, stored: Stored) -> None:
        record = stored.record
        prompt = list(gateway_pb.Submit.FromString(stored.submit).prompt)
        whole = answer(prompt, record.request.max_tokens)
        tokens = [token for round in decode(stored.log) for token in round.tokens]
        if tokens != whole[: len(tokens)]:
            self.violated(f"the store holds for {id} what no model wrote: {tokens}")
        if len(tokens) != record.emitted:
            self.violated(f"the store holds {len(tokens)} tokens of {id}, and says {record.emitted}")
        if record.state is State.FINISHED and tokens != whole:
            self.violated(f"{id} finished with {len(tokens)} of its {len(whole)} tokens")
        if record.state.live != (stored.ending is None):
            self.violated(f"{id} is stored as {record.state.value}, its ending as {stored.ending!r}")
        kept = self.kept.get(id)
        if kept is None or kept.arrival != record.request.arrival:
            if kept is not None and not self.excused:
                self.violated(f"{id} is run twice")
            kept = self.kept[id] = Kept(record.request.arrival, tokens)
        if kept.ending is not None and stored.ending is not None and stored.ending != kept.ending and not self.excused:
            self.violated(f"{id} ended twice: {_reason(kept.ending)}, then {_reason(stored.ending)}")
        if len(tokens) > len(kept.tokens):
            if kept.ending is not None and not self.excused:
                self.violated(f"{id} went on after its end")
            kept.tokens = tokens
        kept.ending = stored.ending or kept.ending

    def heard(self, ids: Iterable[str]) -> None:
        """A commit with these requests is answered, or a leader reads them: where they are lost it writes them anew."""
        for id in ids:
            if id in self.kept:
                self.kept[id].heard = True

    def lost(self, store: MemoryStore) -> None:
        """The store forgot what it no longer holds. A request that was never acknowledged may be submitted anew: no
        leader has to know it, and no client was told of it."""
        self.kept = {id: kept for id, kept in self.kept.items() if kept.heard or id in store.requests}

    # ---- what a client sees ----

    def accepted(self, id: str) -> None:
        if id not in self.kept:
            self.violated(f"{id} was accepted before it was durable")

    def delivered(self, id: str, until: int) -> None:
        if id not in self.kept or until > len(self.kept[id].tokens):
            durable = len(self.kept[id].tokens) if id in self.kept else None
            self.violated(f"{until} tokens of {id} were delivered, {durable} were durable")

    def ended(self, id: str, reason: int) -> None:
        ending = self.kept[id].ending if id in self.kept else None
        if ending is None or _reason(ending) != reason:
            told = types_pb2.FinishReason.Name(reason)  # type: ignore[arg-type]
            self.violated(f"a client of {id} was told {told}, the store {ending and _reason(ending)}")

    # ---- at the end ----

    def at_the_end(self, store: MemoryStore) -> None:
        for id, stored in store.requests.items():
            if stored.ending is None:
                self.violated(f"{id} is still {stored.record.state.value} in the store")


def _reason(ending: bytes) -> int:
    return gateway_pb.Ending.FromString(ending).finish_reason
