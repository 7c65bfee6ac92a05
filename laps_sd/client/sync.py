"""The client for ordinary code: threads may share one. Which calls are repeated, and what is said in them, is
decided in attempts.py and base.py."""

import os
import time
from collections.abc import Generator
from typing import Any, Never, Self, Unpack

import grpc

from laps_sd.client.attempts import FIRST_PAUSE_S, Attempts
from laps_sd.client.base import CLOSED, MAX_RETRIES, SERVING, Base, Connection
from laps_sd.client.completion import Collector, Completion
from laps_sd.client.params import Params
from laps_sd.client.reading import read
from laps_sd.client.results import Chunk, PolicyComparison, RequestPage, RequestStatus, Stats
from laps_sd.client.wire import NotServing, inference_pb2


class Client(Base):
    """`with Client() as client: print(client.complete("Hi", max_tokens=20).text)`. AsyncClient is the same for asyncio.

    Every call raises a RequestError. A client may be used by many threads. gRPC does not survive a fork: a process that
    was forked makes a client of its own, and so do its parent's other children.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        super().__init__(server, api_key=api_key, ca=ca, max_retries=max_retries)
        self._opened, self._process, self._closed = self._open(grpc), os.getpid(), False

    __init__.__doc__ = Base.__init__.__doc__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Never:
        raise TypeError("Client is used without async: `with Client(...)`; for asyncio there is AsyncClient")

    async def __aexit__(self, *error: object) -> None: ...

    def close(self) -> None:
        """Hangs up, for good."""
        self._closed = True
        for each in self._opened:
            each.channel.close()

    def _to(self, at: int) -> Connection:
        """The connection to target number `at`."""
        if os.getpid() != self._process:
            raise RuntimeError("this client was made before the process was forked: make one in the child")
        if self._closed:
            raise NotServing(CLOSED)
        return self._opened[at % len(self._opened)]

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **params: Unpack[Params]
    ) -> Generator[Chunk, None, None]:
        """The chunks of an answer as they come. Closing the iterator hangs up, which does what `on_disconnect` says.

        Given `on_disconnect="detach"` the stream survives a lost connection or gateway: the request is sent again under
        its id, which is drawn here if none was given, and the stream continues where it broke off. It is given up after
        half a minute without an answer. A connection that lasts longer counts as one, for a queue may be long: only
        `timeout_s` bounds that.
        """
        return self._chunks(self._generating("generate", prompt, timeout_s, params))

    def resume(
        self, request_id: str, offset: int = 0, *, timeout_s: float | None = None
    ) -> Generator[Chunk, None, None]:
        """The chunks of a request from output token `offset` on. A broken stream is continued, as a detached one is."""
        return self._chunks(self._resuming(request_id, offset, timeout_s))

    def _chunks(self, attempts: Attempts) -> Generator[Chunk, None, None]:
        while not attempts.whole:
            at = self._at
            call = self._stream_call(self._to(at), attempts)
            try:
                for message in call:
                    yield attempts.got(message)
                attempts.ended()
                return
            except grpc.RpcError as error:
                if attempts.whole:
                    return
                pause_s = self._pause_s(attempts, error, at)
            finally:
                call.cancel()
            time.sleep(pause_s)

    def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **params: Unpack[Params]
    ) -> Completion:
        """The whole answer of `generate`, which takes the same arguments."""
        collector = Collector()
        for chunk in self._chunks(self._generating("complete", prompt, timeout_s, params)):
            collector.add(chunk)
        return collector.completion()

    def cancel(self, request_id: str) -> None:
        """End a request at once."""
        self._ask("Cancel", self._asking(inference_pb2.CancelRequest(), request_id=request_id))

    def status(self, request_id: str) -> RequestStatus:
        """The state of one request: why does it wait, how far is it?"""
        asked = self._asking(inference_pb2.GetRequestRequest(), request_id=request_id)
        return read(RequestStatus, self._ask("GetRequest", asked).request)

    def list_requests(self, page_size: int = 0, page_token: str = "", recent_rounds: int = 0) -> RequestPage:
        """One page of the live requests, those that run first. `page_token`: `next_page_token` of the page before.
        `recent_rounds`: so many of each request's last rounds are told, too."""
        request = inference_pb2.ListRequestsRequest()
        asked = self._asking(request, page_size=page_size, page_token=page_token, recent_rounds=recent_rounds)
        return read(RequestPage, self._ask("ListRequests", asked))

    def compare_policies(self) -> PolicyComparison:
        """The policies side by side on the requests that ended in the last minutes, by the simulator."""
        asked = self._asking(inference_pb2.ComparePoliciesRequest())
        return read(PolicyComparison, self._ask("ComparePolicies", asked))

    def drain_worker(self, worker_id: str, *, force: bool = False) -> int:
        """Have a worker end: what runs there goes on elsewhere at last. Returns how many workers remain; `force`: even
        none. Raises UnknownRequest for a worker that is not attached, Incompatible for the last one. A broken
        call is not repeated: asked twice, the worker may be gone."""
        asked = self._asking(inference_pb2.DrainWorkerRequest(), again=False, worker_id=worker_id, force=force)
        return int(self._ask("DrainWorker", asked).remaining)

    def stats(self) -> Stats:
        """Figures of the whole service."""
        return read(Stats, self._ask("Stats", self._asking(inference_pb2.StatsRequest())))

    def ready(self, timeout_s: float | None = 60.0) -> None:
        """Returns once a warmed worker serves; raises NotServing after `timeout_s` seconds (None: never), or as soon as
        it is clear that waiting is of no use."""
        attempts, cause = self._waiting(timeout_s), None
        while True:
            at, pause_s = self._at, FIRST_PAUSE_S
            call = self._health_call(self._to(at), attempts)
            try:
                for answer in call:
                    if answer.value == SERVING:
                        return
                    if len(self._server.targets) > 1:
                        break  # another gateway may serve
            except grpc.RpcError as error:
                cause = self._cause(attempts, error, at)
                if (again_s := self._wait_s(attempts, error, cause)) is None:
                    raise self._not_ready(attempts, error, cause) from error
                pause_s = again_s
            finally:
                call.cancel()
            self._at = at + 1
            time.sleep(pause_s)

    def _ask(self, method: str, attempts: Attempts) -> Any:
        while True:
            at = self._at
            try:
                return self._call(self._to(at), method, attempts)
            except grpc.RpcError as error:
                pause_s = self._pause_s(attempts, error, at)
            time.sleep(pause_s)

    def _pause_s(self, attempts: Attempts, error: grpc.RpcError, at: int) -> float:
        """Seconds until the next attempt, at the next target. Raises the RequestError that ends the call."""
        self._at = at + 1
        if self._closed:
            raise NotServing(CLOSED) from error
        if (pause_s := attempts.pause_s(error, len(self._server.targets))) is None:
            raise self._failure(attempts, error, self._cause(attempts, error, at)) from error
        return pause_s
