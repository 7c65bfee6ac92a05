"""What the scheduler's user may do in Redis: use its own keys, with the commands that store/ uses. No client of Redis
lives here."""

import re
from collections.abc import Iterable

# The store's contract suite runs as a user with these commands alone: a command that is missing here fails it.
# `persist` is for a person who mends a request that was set aside.
COMMANDS = (
    *("get", "set", "append", "del", "expire", "exists", "rename", "persist"),
    *("hget", "hset", "hdel", "hmget", "hgetall", "hincrby"),
    *("sadd", "srem", "smembers", "zadd", "zrem", "zrange"),
    *("evalsha", "script|load", "wait"),
    *("auth", "hello", "ping", "select"),
)

NAMESPACE = r"[A-Za-z0-9._-]+"  # what the prefix of every key may be


def rules(namespace: str) -> list[str]:
    """The rules of that user, for ACL SETUSER or a line of an ACL file. They begin by taking everything away."""
    return ["resetkeys", f"~{{{namespace}}}:*", "resetchannels", "nocommands", *_allowed(COMMANDS)]


def acl_file(user: str, password_sha256: str, namespace: str) -> str:
    """The text of a file for `redis-server --aclfile`. A client that does not sign in may PING, and nothing else."""
    stranger = ["user", "default", "on", "nopass", "resetkeys", "resetchannels", "nocommands", *_allowed(["ping"])]
    scheduler = ["user", user, "on", f"#{password_sha256}", *rules(namespace)]
    return "".join(" ".join(words) + "\n" for words in (stranger, scheduler))


def namespace_of(text: str) -> str | None:
    """That of the scheduler's user in an ACL file."""
    found = re.search(r"~\{(" + NAMESPACE + r")\}:\*", text)
    return found[1] if found else None


def _allowed(commands: Iterable[str]) -> list[str]:
    return [f"+{command}" for command in commands]
