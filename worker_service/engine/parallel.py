"""One model over several processes, each with a device and a share of the heads: rank 0 leads, the others follow.

A follower knows no requests and draws no tokens. On its share of weights and KV it repeats every call that the leader's
target gets, until it is told to stop. Processes are not started here (torchrun does that), nor are shares loaded.
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout  # torch has no public name for it
from torch.nn.functional import pad

from worker_service.engine.attention import QueryRange
from worker_service.engine.target import Target

_START_TIMEOUT = timedelta(minutes=30)  # between the first process that has loaded its share and the last
_PASS_TIMEOUT = timedelta(seconds=60)  # of one collective in a forward pass: how late the slowest device may be
# The leader of an idle service may make no call for hours. If it dies its connections close, which ends the wait at
# once.
_IDLE_TIMEOUT = timedelta(days=365)


class ParallelError(ConnectionError):
    """The processes that share a model cannot go on together. The message is for people."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the `size` that share a model; `local`: its rank on this machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> "Ranks":
        """As torchrun sets it; without torchrun a process is alone."""
        named = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, alone)) for name, alone in named.items()))

    @property
    def leads(self) -> bool:
        return self.rank == 0


class ProcessGroup:
    """The processes that share a model. Passes exchange tensors over the devices' own links, calls go over gloo."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Returns when all processes have come. Raises ParallelError."""
        self.ranks = ranks
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        try:
            dist.init_process_group(backend, timeout=_START_TIMEOUT, device_id=bound)
            self._calls = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise ParallelError(f"{ranks.size} processes that share a model do not find each other: {error}") from error

    def target(self, model: Any) -> "SharedTarget":
        """Of this process's share, as the others' leader."""
        return SharedTarget(model, self)

    def loaded(self, pass_timeout: timedelta = _PASS_TIMEOUT) -> None:
        """Returns when all processes have loaded their shares. Raises ParallelError."""
        try:
            dist.monitored_barrier(self._calls, timeout=_START_TIMEOUT)
        except RuntimeError as error:
            raise ParallelError(f"of {self.ranks.size} processes one does not come up: {error}") from error
        set_timeout(pass_timeout)
        if self.ranks.leads:  # its calls wait until every follower has heard them
            set_timeout(pass_timeout, self._calls)

    def call(self, name: str, *arguments: Any) -> None:
        """Have all followers make this call. It travels as JSON, not as a pickle: what comes in over a network must not
        be code. Raises ParallelError.
        """
        try:
            self._broadcast(json.dumps((name, arguments), default=list).encode())
        except RuntimeError as error:  # gloo has no class of its own for a lost connection
            raise ParallelError(f"a process that holds a share of the model is gone: {error}") from error

    def next_call(self) -> tuple[str, list[Any]] | None:
        """The leader's next call, waited for without limit; None: there are no more. Raises ParallelError."""
        try:
            name, arguments = json.loads(self._broadcast(b""))
        except RuntimeError as error:
            raise ParallelError(f"the process that leads is gone: {error}") from error
        return (name, arguments) if name else None

    def leave(self) -> None:
        """The leader lets the others end. Raises ParallelError if they cannot be told."""
        if self.ranks.leads:
            self.call("")
        # As long as this group exists its threads outlive the interpreter, and one that frees a tensor then aborts the
        # process.
        del self._calls
        dist.destroy_process_group()

    def _broadcast(self, data: bytes) -> bytes:
        size = torch.tensor(len(data))
        dist.broadcast(size, 0, self._calls)
        message = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        dist.broadcast(message, 0, self._calls)
        return message.numpy().tobytes()


class SharedTarget(Target):
    """A target whose model is shared: every process makes each call that its leader gets."""

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        """`model`: this process's share, with embeddings and output head whole. Of the head it keeps its own rows."""
        head, ranks = model.get_output_embeddings(), group.ranks
        model.set_output_embeddings(_rows(head, ranks))
        super().__init__(model, shares=ranks.size)
        model.set_output_embeddings(_GatheredHead(model.get_output_embeddings(), head.out_features, ranks))
        self._group = group

    def follow(self) -> None:
        """Repeat the leader's calls until it leaves. Raises ParallelError when the leader is lost."""
        with torch.inference_mode():
            while (call := self._group.next_call()) is not None:
                match call:
                    case "_compute", [*packed, ranges]:
                        self._own("_compute", *packed, [QueryRange(*each) for each in ranges])
                    case ("new_pool" | "save" | "restore" | "discard") as name, arguments:
                        self._own(name, *arguments)
                    case name, _:
                        raise ParallelError(f"the leader asks for {name!r}: it is of another version")

    def new_pool(self, *arguments: Any) -> Any:
        return self._on_all("new_pool", *arguments)

    def _compute(self, *arguments: Any) -> Any:
        return self._on_all("_compute", *arguments)

    def save(self, *arguments: Any) -> None:
        self._on_all("save", *arguments)

    def restore(self, *arguments: Any) -> None:
        self._on_all("restore", *arguments)

    def discard(self, *arguments: Any) -> None:
        self._on_all("discard", *arguments)

    def _on_all(self, name: str, *arguments: Any) -> Any:
        self._group.call(name, *arguments)
        return self._own(name, *arguments)

    def _own(self, name: str, *arguments: Any) -> Any:
        try:
            result = getattr(super(), name)(*arguments)
            self.wait()  # here a process that is gone has a name
            return result
        except RuntimeError as error:
            n = self._group.ranks.size
            raise ParallelError(f"a pass over {n} processes failed, or one of them is gone: {error}") from error


def _rows(head: torch.nn.Linear, ranks: Ranks) -> torch.nn.Linear:
    """This rank's rows of the head. All ranks have the same number of rows; the last ones are filled up with zeros."""
    rows = -(-head.out_features // ranks.size)
    first = rows * ranks.rank

    def part(whole: torch.Tensor) -> torch.nn.Parameter:
        own = whole.detach()[first : first + rows]
        return torch.nn.Parameter(
            pad(own, (0, 0) * (own.dim() - 1) + (0, rows - len(own))).clone(), requires_grad=False
        )

    result = torch.nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")
    result.weight = part(head.weight)
    if head.bias is not None:
        result.bias = part(head.bias)
    return result


class _GatheredHead(torch.nn.Module):
    """An output head of which each process computes some rows. The leader gets all logits, a follower only its own."""

    def __init__(self, rows: torch.nn.Module, outputs: int, ranks: Ranks) -> None:
        super().__init__()
        self._rows, self._outputs, self._ranks = rows, outputs, ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self._rows(hidden).contiguous()
        parts = [torch.empty_like(own) for _ in range(self._ranks.size)] if self._ranks.leads else None
        dist.gather(own, parts)
        return own if parts is None else torch.cat(parts, -1)[..., : self._outputs]
