"""Redis over TLS, as a user who may do what the store needs and no more. What is enough, the contract suite shows."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from pydantic import ValidationError
from redis.exceptions import AuthenticationError, NoPermissionError

from laps_sd.ports import claim_ports
from scheduler_service.config import Settings
from scheduler_service.store import RedisStore, StoreUnavailable
from scheduler_service.store.acl import acl_file
from tests.conftest import redis_binary, redis_server
from tests.scheduler.redis_group import Node

pytestmark = pytest.mark.redis

OF_TLS = {"ca_certs": "ca", "certfile": "cert", "keyfile": "key"}  # what the client calls them, and our settings


def settings(**values: object) -> Settings:
    return Settings(_cli_parse_args=False, **values)  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("EVAL", "return 1", "0"),
        ("CLIENT", "LIST"),
        ("SUBSCRIBE", "anything"),
        ("GET", "{another}:epoch"),
        ("SET", "epoch", "1"),
    ],
)
def test_what_the_scheduler_does_not_need_is_refused(
    redis_url: str, redis_user: dict[str, str], command: tuple[str, ...]
) -> None:
    with redis.Redis.from_url(redis_url, **redis_user) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


async def test_the_acl_file_lets_the_scheduler_in_with_its_password_and_a_stranger_only_ping(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text(acl_file("scheduler", hashlib.sha256(b"secret").hexdigest(), "laps-sd"))
    with redis_server(tmp_path, "--aclfile", str(tmp_path / "users.acl")) as server:
        store = RedisStore(server.url, options={"username": "scheduler", "password": "secret"})
        assert await store.lead(5) == 5
        await store.close()
        with redis.Redis.from_url(server.url) as stranger:
            assert stranger.ping()
            with pytest.raises(NoPermissionError):
                stranger.get("{laps-sd}:leader")
        with (
            redis.Redis.from_url(server.url, username="scheduler", password="guess") as guesser,
            pytest.raises(AuthenticationError),
        ):
            guesser.ping()


@asynccontextmanager
async def behind_tls(redis_url: str, certs: Path) -> AsyncIterator[int]:
    """A TLS port before the server's socket, as redis-server --tls-auth-clients yes would have it; yields the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certs / "redis" / "ca.crt")
    context.load_cert_chain(certs / "redis" / "tls.crt", certs / "redis" / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while some := await reader.read(1 << 16):
                writer.write(some)
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_the_store_speaks_mutual_tls_to_redis(
    redis_url: str, redis_user: dict[str, str], namespace: str, certs: Path, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text(redis_user["password"] + "\n")
    names = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
    async with behind_tls(redis_url, certs) as port:
        chosen = settings(
            redis_url=f"rediss://{redis_user['username']}@127.0.0.1:{port}/0",
            redis_password_file=tmp_path / "password",
            tls={name: certs / "scheduler" / file for name, file in names.items()},
        )
        store = RedisStore(chosen.redis_url, namespace=namespace, options=chosen.redis_options())
        assert await store.lead(7) == 7
        await store.close()
        for stranger in ({}, {"ssl_ca_certs": str(certs / "worker" / "ca.crt")}):  # trusts nobody; shows nothing
            store = RedisStore(chosen.redis_url, namespace=namespace, options={**redis_user, **stranger})
            with pytest.raises(StoreUnavailable):
                await store.lead(8)
            await store.close()


async def test_the_store_speaks_mutual_tls_to_sentinels_and_to_the_primary_that_they_name(
    certs: Path, tmp_path: Path
) -> None:
    tls = ["--tls-replication", "yes", "--tls-ca-cert-file", str(certs / "redis" / "ca.crt")]
    tls += ["--tls-cert-file", str(certs / "redis" / "tls.crt"), "--tls-key-file", str(certs / "redis" / "tls.key")]
    names = {"ca": certs / "scheduler" / "ca.crt", "cert": certs / "scheduler" / "tls.crt"}
    names["key"] = certs / "scheduler" / "tls.key"
    options = {"ssl": True, **{f"ssl_{name}": str(names[part]) for name, part in OF_TLS.items()}}
    (tmp_path / "sentinel.conf").touch()
    ports = claim_ports(0, 0)
    of_primary, of_sentinel = ([*tls, "--port", "0", "--tls-port", str(port)] for port in ports)
    primary = Node(ports[0], tmp_path, of_primary, options)
    monitor = ["--sentinel", "monitor", "main", "127.0.0.1", str(ports[0]), "1"]
    sentinel = Node(
        ports[1], tmp_path, [str(tmp_path / "sentinel.conf"), "--sentinel", *of_sentinel, *monitor], options
    )
    try:
        await primary.start()
    except AssertionError:
        pytest.skip(f"{redis_binary()} was built without TLS")
    try:
        await sentinel.start()
        url = f"rediss+sentinel://127.0.0.1:{ports[1]}/main"
        chosen = settings(redis_url=url, tls=names)
        store = RedisStore(url, options=chosen.redis_options())
        assert await store.lead(7) == 7
        await store.close()
        store = RedisStore(url, options={"ssl_ca_certs": str(names["ca"])})  # it shows no certificate
        with pytest.raises(StoreUnavailable):
            await store.lead(8)
        await store.close()
    finally:
        primary.kill()
        sentinel.kill()


@pytest.mark.parametrize(
    ("url", "clear"),
    [
        ("redis://10.0.0.1", True),
        ("redis://me:secret@redis:6379/0", True),
        ("rediss://redis:6379/0", False),
        ("redis://127.0.0.1:6379/0", False),
        ("redis://[::1]:6379", False),
        ("redis://", False),
        ("unix:///run/redis.sock", False),
        ("redis+sentinel://me:secret@127.0.0.1,10.0.0.1:26379/main", True),
        ("redis+sentinel://127.0.0.1,[::1]:26379/main/3", False),
        ("rediss+sentinel://10.0.0.1/main", False),
    ],
)
def test_a_scheduler_knows_when_it_talks_to_another_machine_in_the_clear(url: str, clear: bool) -> None:
    assert settings(redis_url=url).redis_in_the_clear is clear


def test_a_password_file_of_no_use_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="No such file"):
        settings(redis_password_file=tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValidationError, match="empty"):
        settings(redis_password_file=tmp_path / "empty")
