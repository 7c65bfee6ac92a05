"""Who may see the page: without keys this machine, with keys whoever has the right admin, by a short-lived cookie."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from gateway.keys import Keys, Right, new_key
from gateway.page.routes import LOGIN_BYTES
from gateway.page.sessions import COOKIE, LIFE_S, Sessions
from protos.errors import Unauthenticated
from tests.gateway.page.pages import Watched, next_of, page, watching

DATA = ("/page/feed", "/page/policies")


class People(NamedTuple):
    file: Path
    admin: str
    user: str
    line: str  # of the user, alone


@pytest.fixture
def people(tmp_path: Path) -> People:
    admin, admin_line = new_key("ops", [Right.ADMIN, Right.GENERATE])
    user, user_line = new_key("somebody", [Right.GENERATE])
    file = tmp_path / "keys"
    file.write_text(f"{admin_line}\n{user_line}\n")
    return People(file, admin, user, user_line)


@asynccontextmanager
async def keyed(people: People, **settings: Any) -> AsyncIterator[tuple[Watched, httpx2.AsyncClient]]:
    async with page(api_keys=people.file, **settings) as (_, scheduler, _, client):
        yield scheduler, client


async def test_without_keys_the_page_is_open_on_this_machine() -> None:
    async with page() as (_, _, _, client):
        assert (await client.get("/page/session")).json() == {"open": True, "keyed": False}
        assert (await client.get("/page/policies")).status_code == 200


@pytest.mark.parametrize("path", ["/page/feed", "/page/policies", "/page/prompt"])
async def test_without_keys_a_name_that_leads_here_shows_nothing(path: str) -> None:
    """DNS rebinding: a foreign site's own name, resolved to this machine."""
    async with page() as (_, _, _, client):
        method = "POST" if path.endswith("prompt") else "GET"
        headers = {"host": "foreign.example:8080", "content-type": "application/json"}
        answer = await client.request(method, path, content='{"prompt": "a"}', headers=headers)
        assert answer.status_code == 403
        assert "set --api-keys" in answer.json()["error"]["message"]


async def test_with_keys_the_files_are_open_and_no_figure_is(people: People) -> None:
    async with keyed(people) as (scheduler, client):
        assert (await client.get("/")).status_code == 200
        for path in DATA:
            assert (await client.get(path)).status_code == 401, path
        for path in ("/page/prompt", "/page/samples"):
            assert (await client.post(path, json={"prompt": "a"})).status_code == 401, path
        told = (await client.get("/page/session")).json()
        assert (told["open"], told["keyed"]) == (False, True)
        assert scheduler.stats_asked == scheduler.compared == 0


async def test_an_admin_logs_in_once_and_sees_the_feed(people: People) -> None:
    async with keyed(people) as (_, client):
        answer = await client.post("/page/login", json={"key": people.admin})
        cookie = answer.headers["set-cookie"]
        for attribute in ("HttpOnly", "SameSite=Strict", f"Max-Age={LIFE_S}"):
            assert attribute in cookie, attribute
        assert "Path=" not in cookie  # else it would not be sent where a proxy has put the page elsewhere
        assert people.admin not in cookie
        async with watching(client) as frames:
            assert (await next_of(frames))["policy"] == "gittins"
        assert COOKIE in (await client.get("/page/session")).headers["set-cookie"]  # renewed while it is used
        assert "set-cookie" not in (await client.get("/")).headers


async def test_the_cookie_opens_the_page_and_nothing_else(people: People) -> None:
    async with keyed(people) as (_, client):
        cookie = (await client.post("/page/login", json={"key": people.admin})).cookies[COOKIE]
        client.cookies.clear()
        answer = await client.get("/metrics", headers={"cookie": f"{COOKIE}={cookie}"})
        assert answer.status_code in (200, 401)  # open on this machine, whoever asks
        forged = {"authorization": f"Bearer {cookie}"}
        assert (await client.get("/page/policies", headers=forged)).status_code == 401


@pytest.mark.parametrize(
    ("key", "status"), [("nonsense", 401), ("", 401), ("laps_00000000_x", 401), (None, 400), ({"a": 1}, 401)]
)
async def test_a_wrong_key_gets_no_cookie(people: People, key: object, status: int) -> None:
    async with keyed(people) as (_, client):
        answer = await client.post("/page/login", json={} if key is None else {"key": key})
        assert answer.status_code == status
        assert "set-cookie" not in answer.headers


async def test_a_stranger_sends_no_long_key(people: People) -> None:
    async with keyed(people) as (_, client):
        answer = await client.post("/page/login", json={"key": people.admin, "more": "a" * LOGIN_BYTES})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_key_without_the_right_admin_gets_no_cookie(people: People) -> None:
    async with keyed(people) as (_, client):
        answer = await client.post("/page/login", json={"key": people.user})
        assert answer.status_code == 403
        assert "the key needs the right admin" in answer.json()["error"]["message"]


async def test_a_program_sends_its_key_with_each_request(people: People) -> None:
    async with keyed(people) as (_, client):
        headers = {"authorization": f"Bearer {people.admin}"}
        assert (await client.get("/page/policies", headers=headers)).status_code == 200
        headers = {"authorization": f"Bearer {people.user}"}
        assert (await client.get("/page/policies", headers=headers)).status_code == 403


async def test_a_revoked_key_ends_its_cookies(people: People) -> None:
    async with keyed(people) as (_, client):
        await client.post("/page/login", json={"key": people.admin})
        assert (await client.get("/page/policies")).status_code == 200
        people.file.write_text(people.line + "\n")
        assert (await client.get("/page/policies")).status_code == 401


async def test_logging_out_takes_the_cookie_away(people: People) -> None:
    async with keyed(people) as (_, client):
        await client.post("/page/login", json={"key": people.admin})
        await client.post("/page/logout", json={})
        assert (await client.get("/page/policies")).status_code == 401


def test_a_cookie_is_refused_once_it_is_old_changed_or_anothers(people: People) -> None:
    now = 1000.0
    sessions = Sessions(Keys(people.file), lambda: now)
    cookie = sessions.login(people.admin)
    id, until, mac = cookie.split(".")
    assert sessions._signed(cookie) == id
    wrong = [
        f"{id}.{int(until) + 1}.{mac}",
        f"{people.user.split('_')[1]}.{until}.{mac}",
        f"{id}.{until}.{mac[:-1]}",
        f"{id}.{until}.é",
        f"{id}.²³.{mac}",
        f"{id}.{'9' * 5000}.{mac}",
        "",
        "..",
        Sessions(Keys(people.file), lambda: now).login(people.admin),  # of another process
    ]
    for changed in wrong:
        with pytest.raises(Unauthenticated):
            sessions._signed(changed)
    now += LIFE_S
    with pytest.raises(Unauthenticated):
        sessions._signed(cookie)


async def test_the_page_behind_a_proxy_that_ends_tls_logs_in_over_tls_alone(people: People) -> None:
    async with keyed(people) as (_, client):
        headers = {"host": "laps.example", "sec-fetch-site": "same-origin", "content-type": "application/json"}
        headers |= {"origin": "https://laps.example"}
        answer = await client.post("/page/login", json={"key": people.admin}, headers=headers)
        assert answer.status_code == 200
        assert "Secure" in answer.headers["set-cookie"]
        cookie = f"{COOKIE}={answer.cookies[COOKIE]}"
        renewed = await client.get("/page/session", headers=headers | {"cookie": cookie})
        assert "Secure" in renewed.headers["set-cookie"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "origin": "http://foreign.example"},
        {"content-type": "application/json", "origin": "null"},
        {"content-type": "application/json", "sec-fetch-site": "cross-site"},
        {"content-type": "application/json", "sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/page/prompt", "/page/samples", "/page/login", "/page/logout"])
async def test_another_sites_page_sends_nothing_here(path: str, headers: dict[str, str]) -> None:
    async with page() as (_, _, _, client):
        answer = await client.post(path, content='{"prompt": "a", "key": "a"}', headers=headers)
        assert answer.status_code == 403
        assert "only the page itself" in answer.json()["error"]["message"]
