"""Both clients against a real port: the same answers, the same errors."""

import asyncio
import multiprocessing
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd import AsyncClient, Client
from laps_sd.authority import make_certs
from laps_sd.client import BadInput, BeyondEnd, Chunk, DeadlinePassed, Lost, NotServing, QueueFull, RequestError
from laps_sd.client.base import SERVICE, SERVING
from laps_sd.client.causes import Cause, find_cause
from laps_sd.client.server import find_server
from protos.v1 import inference_pb2
from tests.client.scripted import Gateway, chunk, last, serving
from tests.waiting import WAIT_S

NOBODY = "127.0.0.1:1"
FULL = QueueFull("full", retry_after_ms=1)


def by_sync(method: str, *arguments: Any, **how: Any) -> Callable[..., Any]:
    def call(target: str, **made: Any) -> Any:
        with Client(target, **made) as client:
            answer = getattr(client, method)(*arguments, **how)
            return answer if answer is None or not isinstance(answer, Iterator) else list(answer)

    return call


def by_async(method: str, *arguments: Any, **how: Any) -> Callable[..., Any]:
    async def call(target: str, **made: Any) -> Any:
        async with AsyncClient(target, **made) as client:
            answer = getattr(client, method)(*arguments, **how)
            return [each async for each in answer] if hasattr(answer, "__aiter__") else await answer

    return lambda target, **made: asyncio.run(call(target, **made))


both = pytest.mark.parametrize("by", [by_sync, by_async], ids=["sync", "async"])


@both
def test_an_answer_comes_in_chunks_and_whole(by: Any) -> None:
    script = [chunk(0, [1, 2], "ab"), last(2, [3], "c")]
    with serving(Gateway(script, script)) as gateway:
        chunks: list[Chunk] = by("generate", "x", max_tokens=3)(gateway.target)
        assert [(each.text, each.token_ids, each.offset) for each in chunks] == [("ab", [1, 2], 0), ("c", [3], 2)]
        answer = by("complete", messages=[{"role": "user", "content": "x"}])(gateway.target)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", [1, 2, 3], "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert (gateway.asked[0].max_tokens, gateway.asked[1].chat.messages[0].content) == (3, "x")


@both
def test_a_refusal_is_repeated_as_the_service_says_and_then_raised(by: Any) -> None:
    with serving(Gateway([FULL], [FULL], [last(0)], [FULL], [FULL])) as gateway:
        by("complete", "x")(gateway.target)
        assert len(gateway.asked) == 3
        with pytest.raises(QueueFull, match="full"):
            by("complete", "x")(gateway.target, max_retries=1)
        assert len(gateway.asked) == 5


@both
def test_a_broken_stream_of_a_detached_request_goes_on_where_it_broke(by: Any) -> None:
    script = [[chunk(0, [1, 2], "ab"), grpc.StatusCode.UNAVAILABLE], [last(2, [3], "c")]]
    with serving(Gateway(*script)) as gateway:
        assert by("complete", "x", on_disconnect="detach")(gateway.target).text == "abc"
    assert gateway.asked[1] == inference_pb2.ResumeRequest(request_id="r", offset=2)


@both
def test_a_detached_answer_goes_on_though_the_next_gateway_is_full_for_a_moment(by: Any) -> None:
    script = [[chunk(0, [1, 2], "ab"), grpc.StatusCode.UNAVAILABLE], [FULL], [last(2, [3], "c")]]
    with serving(Gateway(*script)) as gateway:
        assert by("complete", "x", on_disconnect="detach")(gateway.target).text == "abc"
    assert gateway.asked[1:] == [inference_pb2.ResumeRequest(request_id="r", offset=2)] * 2


@both
def test_an_offset_that_the_answer_does_not_have_is_named_so(by: Any) -> None:
    with serving(Gateway([BeyondEnd("offset: 9 is beyond the end")])) as gateway, pytest.raises(BeyondEnd):
        by("resume", "r", 9)(gateway.target)


@both
def test_tokens_that_were_delivered_and_are_gone_are_a_loss(by: Any) -> None:
    script = [[chunk(0, [1, 2]), grpc.StatusCode.UNAVAILABLE], [BeyondEnd("offset: the answer ended at token 1")]]
    with serving(Gateway(*script)) as gateway, pytest.raises(Lost, match="ended at token 1"):
        by("complete", "x", on_disconnect="detach")(gateway.target)


@both
def test_a_drain_whose_answer_is_lost_is_not_asked_for_again(by: Any) -> None:
    """The worker may be gone by then."""
    with serving(Gateway([grpc.StatusCode.UNAVAILABLE], [])) as gateway:
        with pytest.raises(NotServing):
            by("drain_worker", "w")(gateway.target)
        assert len(gateway.asked) == 1


@both
def test_figures_are_typed(by: Any) -> None:
    with serving(Gateway([grpc.StatusCode.UNAVAILABLE], [])) as gateway:
        stats = by("stats")(gateway.target)
    assert (stats.policy, stats.waiting) == ("fcfs", 3)


@both
@pytest.mark.parametrize("ask", [("complete", "x"), ("stats",), ("ready", 0.3)], ids=["complete", "stats", "ready"])
def test_no_server_is_a_question_that_helps(by: Any, ask: Any) -> None:
    with pytest.raises(NotServing, match=f"nothing listens at {NOBODY}: is `laps-sd up` running there"):
        by(*ask)(NOBODY)


@both
def test_a_server_that_never_gets_ready_says_so_after_the_time_given(by: Any) -> None:
    with serving(Gateway()) as gateway, pytest.raises(NotServing, match="no warmed worker"):
        by("ready", 0.3)(gateway.target)


class Watched(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # not typed
    """Ends the first watch with `refusal`, and serves at the next."""

    def __init__(self, refusal: RequestError | grpc.StatusCode) -> None:
        self._script = Gateway([refusal])

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._script.Stats(request, context)
        yield health_pb2.HealthCheckResponse(status=SERVING)


@both
def test_a_server_that_has_no_place_for_now_is_waited_for(by: Any) -> None:
    (gateway := Gateway()).health = Watched(FULL)
    with serving(gateway):
        by("ready", WAIT_S)(gateway.target)


@both
@pytest.mark.parametrize(("timeout_s", "bound"), [(30, r" \(waited 30 s at most\)"), (None, ""), (float("inf"), "")])
def test_a_server_that_cannot_tell_whether_it_is_ready_is_believed(by: Any, timeout_s: Any, bound: str) -> None:
    (gateway := Gateway()).health = Watched(grpc.StatusCode.UNIMPLEMENTED)
    with serving(gateway), pytest.raises(NotServing, match=f"is not ready: broken{bound}$"):
        by("ready", timeout_s)(gateway.target)


@both
def test_a_service_is_ready_when_one_of_its_gateways_is(by: Any) -> None:
    with serving(Gateway()) as idle, serving(Gateway()) as ready:
        ready.health.set(SERVICE, SERVING)
        by("ready", WAIT_S)(f"{idle.target},{ready.target}")


@both
def test_a_deadline_names_who_did_not_finish(by: Any) -> None:
    with serving(Gateway([None])) as gateway, pytest.raises(DeadlinePassed, match=f"{gateway.target} did not finish"):
        by("complete", "x", timeout_s=0.2)(gateway.target)


@both
def test_who_has_answered_was_reached_though_the_deadline_passes(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laps_sd.client.base.find_cause", lambda *_: Cause("it does not answer"))
    late = [chunk(0, [1]), grpc.StatusCode.DEADLINE_EXCEEDED]
    with serving(Gateway(late)) as gateway, pytest.raises(DeadlinePassed, match="did not finish"):
        by("complete", "x")(gateway.target)


@both
@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12, 10**400])
def test_a_deadline_may_be_as_far_as_one_likes(by: Any, timeout_s: float) -> None:
    with serving(Gateway([last(0)])) as gateway:
        assert by("complete", "x", timeout_s=timeout_s)(gateway.target).finish_reason == "length"


@both
@pytest.mark.parametrize("timeout_s", [float("inf"), 10**400])
def test_a_server_may_be_waited_for_for_ever(by: Any, timeout_s: float) -> None:
    with serving(Gateway()) as gateway:
        gateway.health.set(SERVICE, SERVING)
        by("ready", timeout_s)(gateway.target)


@both
def test_a_stream_that_ends_before_its_answer_is_a_loss(by: Any) -> None:
    with serving(Gateway([chunk(0, [1])])) as gateway, pytest.raises(Lost, match="ended after token 1 of r, before"):
        by("complete", "x")(gateway.target)


def credentials(folder: Path) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())])


@both
def test_each_mistake_with_tls_is_named(by: Any, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    others = tmp_path_factory.mktemp("others")
    make_certs(others)
    gateway = certs / "gateway"
    with serving(Gateway([last(0)]), credentials(gateway)) as served:
        (commented := others / "commented.pem").write_bytes("# Autorité\n".encode() + (gateway / "ca.crt").read_bytes())
        by("complete", "x")(served.target, ca=commented)
        with pytest.raises(NotServing, match=f"{served.target} speaks TLS: pass --ca FILE"):
            by("complete", "x")(served.target)
        with pytest.raises(NotServing, match="speaks TLS"):
            by("ready", 30.0)(served.target)
        with pytest.raises(NotServing, match=r"is not vouched for by .*ca\.crt"):
            by("complete", "x")(served.target, ca=others / "gateway" / "ca.crt")
    for ca in (gateway / "ca.crt", commented):
        with serving(Gateway()) as plain, pytest.raises(NotServing, match="does not speak TLS: leave out --ca"):
            by("complete", "x")(plain.target, ca=ca)


class Http(BaseHTTPRequestHandler):
    """Any HTTP server: it answers 501."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@both
def test_the_http_port_in_place_of_the_grpc_port_is_named(by: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Http) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(NotServing, match=f"127.0.0.1:{server.server_port} speaks HTTP.*--grpc-port"):
                by("complete", "x")(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


@both
def test_the_http_port_is_named_with_tls_too(by: Any, certs: Path) -> None:
    gateway = certs / "gateway"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(gateway / "tls.crt", gateway / "tls.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Http) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(NotServing, match=f"127.0.0.1:{server.server_port} speaks HTTP.*--grpc-port"):
                by("complete", "x")(f"127.0.0.1:{server.server_port}", ca=gateway / "ca.crt")
        finally:
            server.shutdown()


def test_an_unknown_host_is_named() -> None:
    cause = find_cause(find_server("nosuch.invalid:5", None, None), "nosuch.invalid:5")
    assert cause is not None
    assert cause.words == "no machine is known by the name nosuch.invalid"


@pytest.mark.parametrize("made", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("server", "more", "sentence"),
    [
        ("127.0.0.1:99999", {}, "server: 127.0.0.1:99999: the port must be from 1 to 65535"),
        ("127.0.0.1:0", {}, "the port must be from 1 to 65535"),
        ("somewhere", {}, "server: 'somewhere' is not HOST:PORT"),
        ("http://a:1", {}, "is not HOST:PORT"),
        ("10.0.0.1:5", {"api_key": "k"}, "api_key: 10.0.0.1:5 is another machine"),
        (NOBODY, {"api_key": "\n"}, "api_key: must be printable ASCII"),
        (NOBODY, {"ca": __file__}, f"ca: {__file__} is no PEM file of certificates"),
        (NOBODY, {"ca": "/dev/null"}, "ca: /dev/null is no PEM file of certificates"),
        (NOBODY, {"ca": "/nosuch"}, "ca: /nosuch cannot be read: No such file"),
        (NOBODY, {"max_retries": "3"}, "max_retries: must be a whole number"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_before_anything_is_sent(
    made: Any, server: str, more: Any, sentence: str
) -> None:
    with pytest.raises(BadInput) as refused:
        made(server, **more)
    assert sentence in str(refused.value)


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_server(None, None, None).targets == ("127.0.0.1:50051",)
    monkeypatch.setenv("LAPS_SD_SERVER", "https://far:1,far:2")
    monkeypatch.setenv("LAPS_SD_API_KEY", "key")
    found = find_server(None, None, None)
    assert (found.targets, found.tls, found.metadata) == (("far:1", "far:2"), True, (("authorization", "Bearer key"),))
    assert find_server("127.0.0.1:7", "mine", None).metadata == (("authorization", "Bearer mine"),)
    assert "key" not in repr(found)
    assert find_server(None, "", None).metadata == ()
    monkeypatch.setenv("LAPS_SD_API_KEY", "")
    assert find_server("far:1", None, None).metadata == ()


@both
def test_the_authority_comes_from_the_environment(by: Any, certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_CA", str(certs / "gateway" / "ca.crt"))
    with serving(Gateway([last(0)]), credentials(certs / "gateway")) as served:
        by("complete", "x")(served.target)
    with serving(Gateway([last(0)])) as plain:
        by("complete", "x")(plain.target, ca="")


def test_the_next_gateway_is_asked_when_one_is_lost() -> None:
    """However many are, also those whose name is known no more."""
    lost = ",".join([NOBODY, "gone.invalid:1"] * 2)
    with serving(Gateway([last(0)])) as gateway, Client(f"{lost},{gateway.target}", max_retries=0) as client:
        assert client.complete("x").finish_reason == "length"


def test_threads_share_a_client() -> None:
    with (
        serving(Gateway(*[[last(0)]] * 20)) as gateway,
        Client(gateway.target) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda _: client.complete("x"), range(20)))
    assert len(answers) == 20


def _in_child(client: Client, said: Any) -> None:
    try:
        client.stats()
    except RuntimeError as error:
        said.send(str(error))
    os._exit(0)


def test_a_client_made_before_a_fork_says_so() -> None:
    client = Client(NOBODY)  # which has not connected yet: gRPC has no threads that a fork could lose
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(client, there))
    child.start()
    assert here.poll(60)
    assert "make one in the child" in here.recv()
    child.join(60)


def test_an_async_client_may_be_used_in_one_event_loop_after_the_other() -> None:
    with serving(Gateway([last(0)], [last(0)])) as gateway:
        client = AsyncClient(gateway.target)
        for _ in range(2):
            assert asyncio.run(client.complete("x")).finish_reason == "length"


async def test_the_synchronous_client_used_as_the_other_one_says_which_is_meant() -> None:
    with pytest.raises(TypeError, match="AsyncClient"):
        async with Client(NOBODY):
            pass


@both
def test_a_server_without_the_call_is_no_gateway(by: Any) -> None:
    """The scheduler's port, say, which `up` prints beside the gateway's."""
    with (
        serving(Gateway([grpc.StatusCode.UNIMPLEMENTED])) as gateway,
        pytest.raises(RequestError, match="is it a gateway"),
    ):
        by("complete", "x")(gateway.target)


@both
def test_every_error_is_a_request_error(by: Any) -> None:
    with serving(Gateway([grpc.StatusCode.INTERNAL])) as gateway, pytest.raises(RequestError):
        by("complete", "x")(gateway.target)


@both
@pytest.mark.usefixtures("proxy")
def test_no_proxy_is_asked_for_a_server_of_this_machine(by: Any) -> None:
    with serving(Gateway([])) as gateway:
        assert by("stats")(gateway.target).policy == "fcfs"
