"""What children print, as entries of one log: a line that is no JSON yet, such as one of Redis, becomes an entry."""

import json
import re
from datetime import UTC, datetime

_REDIS = re.compile(r"\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ (?P<mark>[.*#-]) (?P<words>.*)")
_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
# What Redis says as a warning at each healthy start and end, some versions more than others. It never forks for a
# snapshot here.
_HEALTHY = re.compile(
    r"WARNING Memory overcommit must be enabled|(Redis|Valkey) is now ready to exit|User requested shutdown"
    r"|oO0OoO0OoO0Oo (Redis|Valkey) is starting|(Redis|Valkey) version=|Configuration loaded|Server initialized"
)


def as_entry(child: str, line: bytes) -> bytes:
    """The line, or a JSON object with the names that services use: service, event, level, timestamp; `words` is what
    the child printed."""
    if line.startswith(b"{") and _is_entry(line):
        return line
    words, level = line.decode(errors="replace").rstrip("\n"), "info"
    if found := _REDIS.fullmatch(words):
        words, level = found["words"], _LEVELS[found["mark"]]
        if _HEALTHY.match(words):
            level = "info"
    entry = {
        "service": child,
        "words": words,
        "event": "printed",
        "level": level,
        "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
    }
    return json.dumps(entry).encode() + b"\n"


def _is_entry(line: bytes) -> bool:
    """Libraries print what only begins so: a dict of Python's, or half a line."""
    try:
        timestamp = json.loads(line).get("timestamp")
        return timestamp is None or bool(datetime.fromisoformat(timestamp))
    except (ValueError, TypeError, RecursionError):
        return False
