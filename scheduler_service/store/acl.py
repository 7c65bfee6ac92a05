"""What the scheduler's user may do in Redis: its own keys, and the commands that store/ uses. No client of Redis."""

from collections.abc import Iterable

# A command that the store begins to use belongs here; the store's contract suite runs as this user.
COMMANDS = (
    *("get", "set", "append", "del", "expire", "hget", "hset", "hdel", "hmget", "hgetall"),
    *("sadd", "srem", "smembers", "zadd", "zrem", "zrange"),
    *("evalsha", "script|load", "multi", "exec"),
    *("auth", "hello", "ping", "select"),
)


def rules(namespace: str) -> list[str]:
    """Of ACL SETUSER, and of a line in an ACL file: from nothing up."""
    return ["resetkeys", f"~{{{namespace}}}:*", "resetchannels", "nocommands", *_allowed(COMMANDS)]


def acl_file(user: str, password_sha256: str, namespace: str) -> str:
    """For `redis-server --aclfile`. Who does not sign in may ask whether Redis is there, and nothing else."""
    stranger = ["user", "default", "on", "nopass", "resetkeys", "resetchannels", "nocommands", *_allowed(["ping"])]
    scheduler = ["user", user, "on", f"#{password_sha256}", *rules(namespace)]
    return "".join(" ".join(words) + "\n" for words in (stranger, scheduler))


def _allowed(commands: Iterable[str]) -> list[str]:
    return [f"+{command}" for command in commands]
