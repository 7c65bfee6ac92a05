"""A real Redis that fails over, as processes on this machine: a primary, its replicas, and Sentinels. Each server asks
for a password, and so do the Sentinels."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from laps_sd.ports import claim_ports
from scheduler_service.store import acl
from tests.conftest import redis_binary
from tests.waiting import until

NAME = "main"
SENTINELS = 3
DOWN_AFTER_MS = 1000  # a server that stands still for less, on a busy machine, is not given up
ADMIN = {"username": "admin", "password": "of-the-servers"}
SENTINELS_SECRET = "of-the-sentinels"
SECRET = "of-the-scheduler"
USERS = f"user default off\nuser admin on >{ADMIN['password']} ~* &* +@all\n"


@dataclass(eq=False)
class Node:
    """A server or a Sentinel. `words`: of its command line. `options`: of a connection to it."""

    port: int
    folder: Path
    words: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    async def start(self, *more: str) -> None:
        """Returns when it answers."""
        command = [redis_binary(), *self.words, *more]
        self.process = await asyncio.to_thread(subprocess.Popen, command, cwd=self.folder, stdout=subprocess.DEVNULL)
        await until(self.answers)

    async def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "it did not start"
        with suppress(RedisError, OSError):
            return bool(await self.ask("PING"))
        return False

    async def ask(self, *words: object) -> Any:
        options = {"socket_timeout": 5.0, "decode_responses": True, **self.options}
        async with aioredis.Redis(host="127.0.0.1", port=self.port, **options) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


class Group:
    """`namespace`: of the keys that the scheduler's user may touch."""

    def __init__(self, folder: Path, namespace: str, replicas: int = 2) -> None:
        ports = claim_ports(*[0] * (1 + replicas + SENTINELS))
        self.namespace = namespace
        self._folder = folder
        self.servers = [self._server(port) for port in ports[: 1 + replicas]]
        self.sentinels = [self._sentinel(port) for port in ports[1 + replicas :]]

    def _server(self, port: int) -> Node:
        folder = self._folder / str(port)
        folder.mkdir()
        own = " ".join(acl.rules(self.namespace))
        (folder / "users.acl").write_text(f"{USERS}user scheduler on >{SECRET} {own}\n")
        words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", "no", "--repl-diskless-sync-delay", "0"]
        words += ["--aclfile", str(folder / "users.acl"), "--masteruser", "admin", "--masterauth", ADMIN["password"]]
        return Node(port, folder, words, ADMIN)

    def _sentinel(self, port: int) -> Node:
        folder = self._folder / str(port)
        folder.mkdir()
        settings = {
            "monitor": f"127.0.0.1 {self.servers[0].port} {SENTINELS // 2 + 1}",
            "down-after-milliseconds": DOWN_AFTER_MS,
            "failover-timeout": 4000,
            "parallel-syncs": len(self.servers),
            "auth-user": "admin",
            "auth-pass": ADMIN["password"],
        }
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", f"requirepass {SENTINELS_SECRET}"]
        lines += [f"sentinel {name} {NAME} {value}" for name, value in settings.items()]
        lines += [f"sentinel sentinel-pass {SENTINELS_SECRET}"]
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        words = [str(folder / "sentinel.conf"), "--sentinel"]
        return Node(port, folder, words, {"password": SENTINELS_SECRET})

    @property
    def url(self) -> str:
        """For the scheduler, with both passwords."""
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://scheduler:{SECRET}@{places}/{NAME}?sentinel_password={SENTINELS_SECRET}"

    async def start(self) -> None:
        """Returns when the group is whole."""
        first, *others = self.servers
        await asyncio.gather(
            first.start(), *(each.start("--replicaof", "127.0.0.1", str(first.port)) for each in others)
        )
        await asyncio.gather(*(each.start() for each in self.sentinels))
        await until(self.whole)

    async def primary(self) -> Node | None:
        """The server that all Sentinels name; None while they do not agree."""
        try:
            told = [await each.ask("SENTINEL GET-MASTER-ADDR-BY-NAME", NAME) for each in self.sentinels]
        except (RedisError, OSError):
            return None
        ports = {int(port) for _, port in told}
        named = [each for each in self.servers if {each.port} == ports]
        return named[0] if named else None

    def replicas(self, primary: Node) -> list[Node]:
        return [each for each in self.servers if each is not primary]

    async def followed(self) -> bool:
        """Whether all replicas follow one primary."""
        if (primary := await self.primary()) is None:
            return False
        try:
            told = await primary.ask("INFO", "replication")
        except (RedisError, OSError):
            return False
        following = [value for name, value in told.items() if name.startswith("slave") and isinstance(value, dict)]
        return [each["state"] for each in following] == ["online"] * (len(self.servers) - 1)

    async def whole(self) -> bool:
        """Whether besides all Sentinels know each other and the servers, and hold none for dead."""
        if not await self.followed():
            return False
        try:
            for sentinel in self.sentinels:
                (seen,) = (await sentinel.ask("SENTINEL MASTERS")).values()
                others = await sentinel.ask("SENTINEL SLAVES", NAME), await sentinel.ask("SENTINEL SENTINELS", NAME)
                flags = [str(each["flags"]) for each in (seen, *others[0], *others[1])]
                if len(flags) != len(self.servers) + SENTINELS - 1 or any(
                    "down" in each or "disconnected" in each for each in flags
                ):
                    return False
        except (RedisError, OSError):
            return False
        return True

    async def moved(self, old: Node) -> Node:
        """The primary, once it is no longer `old`."""

        async def has() -> bool:
            return await self.primary() not in (None, old)

        await until(has)
        primary = await self.primary()
        assert primary is not None
        return primary

    async def replace(self) -> None:
        """Have a Sentinel make another server the primary. The old one does not know for some seconds."""

        async def ordered() -> bool:
            try:
                await self.sentinels[0].ask("SENTINEL FAILOVER", NAME)
            except RedisError:  # the last fail-over is not over yet
                return False
            return True

        await until(ordered)

    async def says(self) -> str:
        """For a person, when something stands still: what each Sentinel and server tells of itself. A Sentinel that
        stood still for 2 s gives up no server for the next 30 s (`sentinel_tilt`)."""
        lines = []
        for nodes, section in ((self.sentinels, "sentinel"), (self.servers, "replication")):
            for each in nodes:
                try:
                    lines.append(f"{each.port}: {await each.ask('INFO', section)}")
                except (RedisError, OSError) as error:
                    lines.append(f"{each.port}: {error}")
        return "\n".join(lines)

    def kill(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.kill()


@asynccontextmanager
async def redis_group(folder: Path, namespace: str, replicas: int = 2) -> AsyncIterator[Group]:
    group = Group(folder, namespace, replicas)
    try:
        await group.start()
        yield group
    finally:
        group.kill()
