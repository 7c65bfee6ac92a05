"""What the HTTP port does for every door: readiness, paths, keys, sizes, request ids, TLS, connections that say
nothing. The doors' own tests are beside their code's names."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.contextvars import get_contextvars, merge_contextvars
from structlog.testing import capture_logs

import protos.http_server
from gateway.app import Gateway
from gateway.http import bodies, errors
from gateway.keys import Right, new_key
from protos.errors import NotServing, QueueFull
from protos.link.v1 import gateway_link_pb2 as pb
from tests.gateway.harness import WAIT_S, Scheduler, gateway, model_info
from tests.waiting import until


@asynccontextmanager
async def port(
    scheduler: Scheduler | None = None, **settings: Any
) -> AsyncIterator[tuple[Gateway, httpx2.AsyncClient]]:
    scheduler = scheduler or Scheduler()
    await scheduler.start()
    try:
        async with (
            gateway(scheduler, **settings) as served,
            httpx2.AsyncClient(base_url=f"http://{served.http}", timeout=WAIT_S) as client,
        ):
            yield served, client
    finally:
        await scheduler.stop()


async def ready(served: Gateway) -> None:
    async def is_ready() -> bool:
        return served.front.ready

    await until(is_ready)


async def test_health_is_503_until_a_worker_serves_and_while_draining() -> None:
    scheduler = Scheduler()
    scheduler.serving = pb.Serving(ready=False)
    async with port(scheduler) as (served, client):
        link = await scheduler.link()
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        await link.send(serving=pb.Serving(ready=True, model=model_info()))
        await ready(served)
        assert (await client.get("/health")).status_code == 200
        await served.drain(0)
        assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize("target", ["http://here:80/live", "https://here/live", "/live"])
async def test_a_target_may_be_a_whole_url(target: str) -> None:
    async with port() as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(f"GET {target} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.readline(), WAIT_S)).split()[1] == b"200"
        writer.close()


async def test_a_path_that_is_not_ours_is_404_and_a_wrong_method_405_in_openais_shape() -> None:
    async with port() as (_, client):
        for path in ("/nope", "/v1", "/readyz", "/metrics/"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        answer = await client.post("/health")
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


async def test_a_path_that_is_nearly_ours_is_told_which_one_is() -> None:
    async with port() as (_, client):
        for path in ("/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions", "//v1/chat/completions"):
            message = (await client.post(f"{client.base_url}".rstrip("/") + path)).json()["error"]["message"]
            assert message.endswith("there is no such path; there is /v1/chat/completions"), message


async def test_every_answer_has_its_date() -> None:
    async with port() as (_, client):
        for path in ("/health", "/nope"):
            told = parsedate_to_datetime((await client.get(path)).headers["date"])
            assert abs((datetime.now(UTC) - told).total_seconds()) < WAIT_S


async def test_a_client_of_tritons_http_is_told_where_its_protocol_is() -> None:
    async with port() as (_, client):
        answer = await client.get("/v2/models/tiny")
        assert answer.status_code == 404
        assert "gRPC" in answer.json()["error"]


async def test_metrics_and_version_are_served() -> None:
    async with port() as (_, client):
        assert "laps_sd_num_requests_live" in (await client.get("/metrics")).text
        assert (await client.get("/version")).json().keys() == {"version"}


async def test_answers_of_the_api_are_counted_by_status_and_refusals_too() -> None:
    async with port() as (_, client):
        for path in ("/health", "/v1/nope", "/v1/neither"):
            await client.get(path)
        await client.delete("/v1/models")
        told = (await client.get("/metrics")).text
        counted = re.findall(r'laps_sd_http_responses_total\{.*status="(\d+)"\} (\S+)', told)
        assert dict(counted) == {"404": "2.0", "405": "1.0"}


async def test_every_answer_has_a_request_id_and_a_valid_one_of_the_client_is_kept() -> None:
    async with port() as (_, client):
        assert len((await client.get("/nope")).headers["x-request-id"]) == 32
        kept = await client.get("/health", headers={"x-request-id": "mine-1"})
        assert kept.headers["x-request-id"] == "mine-1"
        drawn = await client.get("/health", headers={"x-request-id": "not valid!"})
        assert len(drawn.headers["x-request-id"]) == 32


async def test_the_id_of_a_request_is_not_lent_to_the_next_one_of_its_connection() -> None:
    async with port() as (served, _):
        await ready(served)
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        body = b'{"model": "tiny", "prompt": "%b"}' % (b"a" * (100 << 10))
        asked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b"
        seen: list[Any] = []

        async def encode(*_: Any, **__: Any) -> list[int]:
            seen.append(get_contextvars().get("x_request_id"))
            return []

        served.front.encode = encode  # type: ignore[method-assign]
        for id in (b"X-Request-Id: mine-1\r\n", b"", b""):  # long: the reading of the body pauses
            writer.write(asked % (id, len(body), body))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert head.startswith(b"HTTP/1.1 200 ")
            (length,) = re.findall(rb"content-length: ([0-9]+)", head.lower())
            await asyncio.wait_for(reader.readexactly(int(length)), WAIT_S)
        assert seen == ["mine-1", None, None]
        writer.close()


async def test_a_body_too_long_is_refused_unread() -> None:
    async with port(max_input_bytes=1) as (_, client):
        answer = await client.post("/nope", content=b"x" * (1 << 20))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_connection_that_asks_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protos.http_server, "IDLE_S", 0.05)
    async with port() as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


async def test_a_client_that_sends_its_whole_long_body_first_hears_that_it_is_too_long() -> None:
    """A connection that is closed while bytes still come is reset, and the client never sees the answer."""
    async with port(max_input_bytes=1) as (served, _):
        host, _, number = served.http.rpartition(":")
        for head in (b"Content-Length: 30000000", b"Transfer-Encoding: chunked"):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            part = b"a" * 3_000_000
            for _ in range(10):
                writer.write(part if head.startswith(b"C") else b"2dc6c0\r\n" + part + b"\r\n")
                await asyncio.wait_for(writer.drain(), WAIT_S)
            assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 413")
            writer.close()


async def test_a_body_that_never_ends_is_read_no_longer_than_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINGER_S", 0.05)
    async with port(max_input_bytes=1) as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.1 413")
        writer.close()


@pytest.mark.parametrize("head", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
async def test_a_body_that_is_not_whole_in_time_is_refused_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)
    async with port() as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + b"1\r\n{\r\n")
        assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 408 ")
        (told,) = re.findall(rb'"message": ?"(.*?)"', await asyncio.wait_for(reader.read(), WAIT_S))
        assert told == b"body: not whole after 0.05 s"
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_request_are_told_in_openais_shape(sent: bytes) -> None:
    async with port() as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head.lower()
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
        writer.close()


@pytest.mark.parametrize(
    ("before", "rest"),
    [
        pytest.param(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /liv", id="half a request"),
        pytest.param(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"abc", id="half a body"),
    ],
)
async def test_a_connection_on_which_a_later_request_never_becomes_whole_is_closed(
    monkeypatch: pytest.MonkeyPatch, before: bytes, rest: bytes
) -> None:
    async with port() as (served, _):
        host, _, number = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(before)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).startswith(b"HTTP/1.1")
        monkeypatch.setattr(protos.http_server, "IDLE_S", 0.05)  # not before: it holds for the first request, too
        writer.write(rest)
        await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()


async def test_cross_origin_pages_are_let_in_only_where_it_is_set() -> None:
    origin = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with port() as (_, client):
        assert "access-control-allow-origin" not in (await client.options("/health", headers=origin)).headers
    async with port(cors_origins=("https://page.example",)) as (_, client):
        answer = await client.options("/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        shown = (await client.get("/health", headers=origin)).headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "retry-after-ms", "x-should-retry"} == set(shown)


async def test_a_named_page_of_the_internet_may_reach_a_gateway_in_a_private_network() -> None:
    """Chromium asks before it lets such a page do so."""
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    async with port(cors_origins=("https://page.example",)) as (_, client):
        named = await client.options("/v1/models", headers=asked | {"origin": "https://page.example"})
        assert (named.status_code, named.headers["access-control-allow-private-network"]) == (200, "true")
        other = await client.options("/v1/models", headers=asked | {"origin": "https://foreign.example"})
        assert other.status_code == 400


OWN_PAGE = {"origin": "{own}", "sec-fetch-site": "same-origin"}
REBOUND = {"host": "foreign.example:8080", "origin": "http://foreign.example:8080"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # no browser
        ({"host": "proxy.example"}, 200),  # no browser, behind a proxy or a forwarded port
        ({"sec-fetch-site": "none"}, 200),  # typed by its user
        (OWN_PAGE, 200),
        ({"origin": "https://page.example", "sec-fetch-site": "cross-site"}, 200),  # of --cors-origins
        ({"origin": "https://foreign.example", "content-type": "text/plain"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        (REBOUND, 403),
    ],
)
async def test_without_keys_a_page_asks_only_where_it_is_of_this_port_or_named(
    headers: dict[str, str], status: int
) -> None:
    async with port(cors_origins=("https://page.example",)) as (served, client):
        await ready(served)
        own = f"http://{served.http}"
        said = {name: value.format(own=own) for name, value in headers.items()}
        answer = await client.post("/tokenize", content=b'{"model": "tiny", "prompt": "a"}', headers=said)
        assert answer.status_code == status
        if status == 403:
            assert "cors_origins" in answer.json()["error"]["message"]


async def test_with_keys_a_pages_origin_does_not_matter(tmp_path: Path) -> None:
    """A page that has no key can use none: browsers keep none for it."""
    key, line = new_key("a", [Right.GENERATE])
    (tmp_path / "keys").write_text(line)
    async with port(api_keys=tmp_path / "keys") as (served, client):
        await ready(served)
        headers = {"authorization": f"Bearer {key}", "origin": "https://page.example"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_what_nobody_foresaw_is_answered_and_logged_as_any_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    asked = {"origin": "https://page.example", "x-request-id": "mine-1"}
    async with port(cors_origins=("https://page.example",)) as (served, client):
        monkeypatch.setattr(served.front, "get_request", broken)
        with capture_logs(processors=[merge_contextvars]) as logs:
            answer = await client.get("/v1/requests/r", headers=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (answer.headers["x-request-id"], "date" in answer.headers) == ("mine-1", True)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        (entry,) = [entry for entry in logs if entry["event"] == "unexpected"]
        assert (entry["x_request_id"], entry["path"]) == ("mine-1", "/v1/requests/r")


def test_a_hint_when_to_retry_is_told_in_seconds_and_in_milliseconds() -> None:
    answer = errors.response(QueueFull("full", retry_after_ms=1200))
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (429, "2", "1200")
    assert errors.response(NotServing("draining")).status_code == 503


async def test_a_port_that_is_taken_is_an_os_error() -> None:
    async with port() as (served, _):
        number = int(served.http.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{number}"):
            async with gateway(Scheduler(), http_port=number):
                pass
