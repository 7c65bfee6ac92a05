"""What earlier versions of the code left in Redis, and how it was recorded. `load` puts it into a Redis of today."""

import json
from pathlib import Path

import redis

from scheduler_service.store.redis import Keys

FOLDER = Path(__file__).parent


def load(client: redis.Redis, name: str, namespace: str) -> None:
    """Every key of NAME.json, under another namespace."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    for key, (kind, ttl_s, value) in recorded.items():
        key = key.replace("{laps-sd}", f"{{{namespace}}}")
        match kind:
            case "hash":
                client.hset(key, mapping={field: _raw(text) for field, text in value.items()})
            case "string":
                client.set(key, _raw(value))
            case "set":
                client.sadd(key, *value)
            case "zset":
                client.zadd(key, value)
        if ttl_s > 0:
            client.expire(key, ttl_s)
    assert client.exists(Keys(namespace).leader)


def _raw(text: str) -> bytes:
    return text.encode("latin-1")
