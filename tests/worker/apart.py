"""A drafter elsewhere that does what a test says: a gRPC server that knows the texts beforehand, and tells as much of
them, as truly and as orderly as it is asked to. `python -m tests.worker.apart SETTINGS` is one in a process."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import grpc

from protos.channels import options
from protos.link.v1 import draft_link_pb2 as pb
from worker_service.engine.drafting.prefix import EMPTY, extended

LIES = ("random ids", "unknown ids", "100,000 tokens", "foreign handles", "wrong digests", "64 MB", "lost again")
DISORDERS = ("drop", "repeat", "reorder", "late", "silent", "no wire", "flood")
_UNKNOWN = 1 << 31


@dataclass
class Session:
    texts: dict[int, list[int]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


@dataclass
class Script:
    """`texts`: whole ones, prompt and output. `right`: the chance of a guess that is meant honestly."""

    texts: Sequence[Sequence[int]] = ()
    right: float = 0.8
    mode: str = "honest"
    mode_file: str = ""  # if it is given, the mode is what is written there; nothing: honest
    delay_s: float = 0.0  # before each answer
    handles: int = 64
    context_tokens: int = 100_000
    step_s: float = 0.0  # as in DraftWelcome
    ids: int = 300  # a guess that is wrong is one of so many
    random: Random = field(default_factory=lambda: Random(0))
    hellos: list[pb.DraftHello] = field(default_factory=list)
    truths: list[pb.Truth] = field(default_factory=list)
    messages: int = 0
    spoken: threading.Condition = field(default_factory=threading.Condition)

    def Attach(self, requests: Iterator[pb.ToDrafter], context: Any) -> Iterator[Any]:  # noqa: N802
        self.hellos.append(next(requests).hello)
        yield pb.FromDrafter(
            welcome=pb.DraftWelcome(
                protocol=1,
                model="script",
                context_tokens=self.context_tokens,
                vocab_size=_UNKNOWN,
                handles=self.handles,
                longest_chain=16,
                step_s=self.step_s,
            )
        )
        session = Session()
        for message in requests:
            if not message.HasField("truths"):
                yield pb.FromDrafter()
                continue
            chains = [chain for row in message.truths.rows if (chain := self._read(session, row))]
            self.messages += 1
            if self.mode_file:
                self.mode = Path(self.mode_file).read_text() or "honest"
            time.sleep(self.delay_s)
            yield from self._disordered(session, self._told(session, chains))
            with self.spoken:
                self.spoken.notify_all()

    def _read(self, session: Session, row: pb.Truth) -> pb.Chain | None:
        self.truths.append(row)
        if row.forget:
            session.texts.pop(row.handle, None)
            return None
        text = session.texts.setdefault(row.handle, [])
        if row.start > len(text):
            return pb.Chain(handle=row.handle, at=len(text), standing=pb.STANDING_SEND)
        text[row.start :] = row.tokens
        if not row.ahead:
            return None
        guesses = self._guesses(text, row.ahead)
        return pb.Chain(handle=row.handle, at=len(text), prefix=extended(EMPTY, text), tokens=guesses)

    def _guesses(self, text: Sequence[int], most: int) -> list[int]:
        whole = next((whole for whole in self.texts if list(whole[: len(text)]) == list(text)), ())
        return [
            token if self.random.random() < self.right else self.random.randrange(self.ids)
            for token in whole[len(text) : len(text) + most]
        ]

    def _told(self, session: Session, chains: Sequence[pb.Chain]) -> Any:
        """The chains, or what a liar makes of them."""
        for chain in chains:
            match self.mode:
                case "random ids":
                    chain.tokens[:] = [self.random.randrange(self.ids) for _ in chain.tokens]
                case "unknown ids":
                    chain.tokens[:] = [_UNKNOWN + token for token in chain.tokens]
                case "100,000 tokens":
                    chain.tokens.extend(self.random.randrange(self.ids) for _ in range(10**5))
                case "foreign handles":
                    chain.handle = self.random.choice([0, chain.handle + 1, *session.texts, 2**32 - 1])
                case "wrong digests":
                    chain.prefix = self.random.randrange(2**64)
                case "lost again":
                    chain.CopyFrom(pb.Chain(handle=chain.handle, at=0, standing=pb.STANDING_SEND))
        message = pb.FromDrafter(drafts=pb.Drafts(chains=chains))
        if self.mode == "64 MB":
            return _huge()
        return message

    def _disordered(self, session: Session, message: Any) -> Iterator[Any]:
        held = session.held
        match self.mode:
            case "no wire":
                yield b"\xff\xff\xff\xff"
            case "silent":
                pass
            case "flood":
                yield from [pb.FromDrafter(drafts=pb.Drafts(chains=[*message.drafts.chains[:1]] * 1500))] * 50
            case "drop":
                if self.messages % 3 == 0:
                    yield message
            case "repeat":
                held.append(message)
                del held[:-8]
                yield from [message, *held, message]
            case "reorder":
                held.append(message)
                if len(held) == 4:
                    yield from self.random.sample(held, 4)
                    held.clear()
            case "late":  # by two truths
                held.append(message)
                if len(held) > 2:
                    yield held.pop(0)
            case _:
                yield message


@cache
def _huge() -> bytes:
    chain = pb.Chain(handle=1, at=1, tokens=[_UNKNOWN] * 10**6)
    return pb.FromDrafter(drafts=pb.Drafts(chains=[chain] * 13)).SerializeToString()


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


@contextmanager
def serving(script: Script, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Its HOST:PORT."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=options(128 << 20))
    rpc = grpc.stream_stream_rpc_method_handler(script.Attach, pb.ToDrafter.FromString, _bytes)
    service = pb.DESCRIPTOR.services_by_name["DraftLink"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Attach": rpc})])
    at = f"127.0.0.1:{port}"
    bound = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(0).wait()


def main() -> None:
    settings = json.loads(sys.argv[1])
    port = settings.pop("port")
    settings["texts"] = json.loads(Path(settings["texts"]).read_text())
    with serving(Script(**settings), port) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        signal.pause()  # until it is killed


if __name__ == "__main__":
    main()
