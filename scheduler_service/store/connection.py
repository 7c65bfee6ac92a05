"""How the store reaches Redis: one server that a URL names, or the primary that Sentinels name whenever a connection is
made. Such URLs are read here; what is said to Redis is in redis.py."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

FORM = (
    "redis://USER:PASSWORD@HOST:PORT/0, redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT,HOST:PORT/PRIMARY/0, "
    "rediss: likewise, or unix:///path/to.sock"
)
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 1.0  # for one to answer; a majority that answers is waited for, and nobody else


class _Parts(NamedTuple):
    """Of the URL of Sentinels."""

    scheme: str  # of their Redis: redis or rediss
    sentinels: Sequence[tuple[str, int]]
    primary: str  # its name
    plain: str  # the URL with a host in place of Sentinels and name: for what all URLs have in common


def by_sentinels(url: str) -> bool:
    """Whether the URL names Sentinels."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def hosts(url: str) -> list[str]:
    """The machines that a URL names; none if it is a socket's. Raises ValueError if it is malformed."""
    if by_sentinels(url):
        return [host for host, _ in _parts(url).sentinels]
    parts = urlsplit(url)
    return [] if parts.scheme == "unix" else [parts.hostname or "localhost"]


def connect(url: str, timeout_s: float, options: Mapping[str, Any]) -> aioredis.Redis:
    """A client of the server, or of the primary; it connects when it is used, for `timeout_s` at most. It waits for
    answers as long as its caller does: to send with a timeout of its own costs it a task for each command. `options`:
    of the connection, beside those of the URL; sentinel_username and sentinel_password are for Sentinels that ask for
    them.

    Raises ValueError or TypeError if the URL is malformed; their words may hold a part of a password.
    """
    # The client must not retry: a commit that may have happened is repeated by its owner, under its number.
    own = {"socket_timeout": None, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0), **options}
    if not by_sentinels(url):
        parts = urlsplit(url)
        database = parts.path.strip("/")
        # In place of either the client library would take its default.
        if parts.port == 0:
            raise ValueError("nobody's port")
        if parts.scheme != "unix" and database and not database.isdecimal():
            raise ValueError("no number of a database")
    client = _of_primary(_parts(url), own) if by_sentinels(url) else aioredis.Redis.from_url(url, **own)
    client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    return client


async def reconnect(client: aioredis.Redis) -> None:
    """Every connection is made anew before it is used again: the server that was the primary is none any more. Answers
    that are on their way still come."""
    pool: Any = client.connection_pool
    await pool.update_active_connections_for_reconnect()
    with suppress(RedisError, OSError, TimeoutError):
        await pool.disconnect(inuse_connections=False)
        if isinstance(pool, SentinelConnectionPool):
            # Else the former primary counts as the one that the client was last connected to, until it connects again.
            await pool.get_master_address()  # type: ignore[no-untyped-call]


async def has_moved(client: aioredis.Redis) -> bool:
    """Whether the Sentinels name another primary than the one that the client was last connected to. That one may not
    know for some seconds that it is none any more, and takes writes that will be lost."""
    pool: Any = client.connection_pool
    try:
        found = await pool.sentinel_manager.discover_master(pool.service_name)
    except RedisError:
        return False
    return bool(pool.master_address not in (None, found))


async def close(client: aioredis.Redis) -> None:
    await client.aclose()
    if isinstance(sentinels := getattr(client.connection_pool, "sentinel_manager", None), Sentinels):
        await sentinels.aclose()


class Sentinels(Sentinel):
    """As the client library has them, but for how they find the primary.

    All are asked at once, so that a machine that is gone holds up nobody. The answers of a majority are heard, and the
    newest configuration counts: a Sentinel that was cut off from the others still names the old primary. Where fewer
    answer they have to do, down to one, which may be such a Sentinel.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Raises MasterNotFoundError."""
        asked = [asyncio.ensure_future(self._asked(client, service_name)) for client in self.sentinels]
        states: list[dict[str, Any]] = []
        silent: list[str] = []
        try:
            for answer in asyncio.as_completed(asked):
                state = await answer
                if isinstance(state, str):
                    silent.append(state)
                else:
                    states.append(state)
                if 2 * len(states) > len(asked):
                    break
        finally:
            for task in asked:
                task.cancel()
        if states:
            newest = max(state["config-epoch"] for state in states)
            for state in states:
                if state["config-epoch"] == newest and self.check_master_state(state, service_name):
                    return state["ip"], state["port"]
            silent.append("it is down")
        raise MasterNotFoundError(f"no primary {service_name}: {'; '.join(silent)}")

    async def _asked(self, client: aioredis.Redis, name: str) -> dict[str, Any] | str:
        """The state of the primary; in words, why this Sentinel does not tell it."""
        kwargs = client.connection_pool.connection_kwargs
        place = f"{kwargs['host']}:{kwargs['port']}"
        try:
            masters = cast("dict[str, dict[str, Any]]", await client.sentinel_masters())
        except (RedisError, OSError, TimeoutError) as error:
            return f"{place}: {str(error) or type(error).__name__}"
        return masters.get(name) or f"{place} knows no {name}"


def _of_primary(parts: _Parts, own: dict[str, Any]) -> aioredis.Redis:
    options = {**own, **parse_url(parts.plain)}
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    secured = {name: value for name, value in options.items() if name.startswith("ssl_")}
    secured["ssl"] = parts.scheme == "rediss"
    signed_in = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), SENTINEL_TIMEOUT_S)
    asking = {**timeouts, "retry": own["retry"], **signed_in, **secured}
    sentinels = Sentinels(parts.sentinels, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    client: aioredis.Redis = sentinels.master_for(parts.primary, ssl=secured["ssl"], **options)
    return client


def _parts(url: str) -> _Parts:
    scheme, _, rest = url.partition("+sentinel://")
    place, _, query = rest.partition("?")
    place, _, path = place.partition("/")
    user, at, listed = place.rpartition("@")
    primary, _, database = path.partition("/")
    sentinels: list[tuple[str, int]] = []
    for each in listed.split(","):
        parts = urlsplit(f"//{each}")
        port = SENTINEL_PORT if parts.port is None else parts.port
        if not parts.hostname or not port:
            raise ValueError("a Sentinel without a host, or nobody's port")
        if (sentinel := (parts.hostname, port)) in sentinels:
            raise ValueError("a Sentinel named twice would count twice in a majority")
        sentinels.append(sentinel)
    if not primary or (database and not database.isdecimal()):
        raise ValueError("no name of a primary, or no number of a database")
    return _Parts(scheme, sentinels, primary, f"{scheme}://{user}{at}localhost/{database or 0}?{query}")
