"""Every line of a child is an entry of one log: services print such entries, Redis and torch print words."""

import json

import pytest

from laps_sd.child_logs import as_entry


def test_an_entry_of_a_service_stays_as_it_is() -> None:
    line = b'{"service": "worker", "event": "warmed", "level": "info"}\n'
    assert as_entry("worker-0", line) == line


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (b"7:M 22 Nov 2026 18:54:36.913 * Ready to accept connections\n", "info", "Ready to accept connections"),
        (b"7:M 22 Nov 2026 18:54:36.913 # Can't save in background\n", "warning", "Can't save in background"),
        (b"Traceback (most recent call last):\n", "info", "Traceback (most recent call last):"),
        (b"{'loss': 1.5}\n", "info", "{'loss': 1.5}"),
        (b'{"event": "cut o\n', "info", '{"event": "cut o'),
        (b'{"event": "\xff"}\n', "info", '{"event": "\ufffd"}'),
        (b'{"a":' * 100_000 + b"\n", "info", '{"a":' * 100_000),
        (b'{"timestamp": 1700000000}\n', "info", '{"timestamp": 1700000000}'),
        (b'{"timestamp": "at noon"}\n', "info", '{"timestamp": "at noon"}'),
    ],
)
def test_words_become_an_entry(line: bytes, level: str, words: str) -> None:
    entry = json.loads(as_entry("redis", line))
    assert (entry["service"], entry["level"], entry["words"]) == ("redis", level, words)
    assert entry["timestamp"].endswith("Z")


@pytest.mark.parametrize(
    "words",
    [
        "WARNING Memory overcommit must be enabled! Without it, ...",
        "oO0OoO0OoO0Oo Redis is starting oO0OoO0OoO0Oo",
        "Redis version=7.0.15, bits=64, commit=00000000, modified=0, pid=7, just started",
        "Configuration loaded",
        "Server initialized",
        "User requested shutdown...",
        "Valkey is now ready to exit, bye bye...",
    ],
)
def test_what_redis_says_at_a_healthy_start_and_end_alarms_nobody(words: str) -> None:
    line = f"7:M 22 Nov 2026 18:54:36.913 # {words}\n".encode()
    assert json.loads(as_entry("redis", line))["level"] == "info"
