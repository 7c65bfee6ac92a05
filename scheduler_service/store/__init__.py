"""Durable queue state: the port, its implementation on Redis and its twin in memory. No scheduling."""

from scheduler_service.store.memory import MemoryStore
from scheduler_service.store.port import (
    Fenced,
    Index,
    LostWrites,
    Pulse,
    Store,
    StoreBusy,
    Stored,
    StoreFull,
    StoreRefuses,
    StoreUnavailable,
    TooFewReplicas,
    Unreadable,
    Verdict,
    Write,
    WrongType,
)
from scheduler_service.store.redis import RedisStore

__all__ = [
    "Fenced", "Index", "LostWrites", "MemoryStore", "Pulse", "RedisStore", "Store", "StoreBusy", "StoreFull",
    "StoreRefuses", "StoreUnavailable", "Stored", "TooFewReplicas", "Unreadable", "Verdict", "Write", "WrongType",
]  # fmt: skip
