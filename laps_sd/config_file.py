"""laps-sd.toml: settings as flags have them, above all sections or in the section of the service that they are for, and
further settings of the services in their sections. Which there are is not known here."""

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

CONFIG = Path("laps-sd.toml")
SERVICES = ("scheduler", "worker", "drafter", "gateway")


def settings_of(file: Path, flags: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the file says: texts by the name of the flag, and by service what no flag says. Raises ValueError.

    `flags`: their names, each with the service in whose section it may stand.
    """
    try:
        told = tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    further = {name: told.pop(name) for name in SERVICES if isinstance(told.get(name), dict)}
    for service, section in further.items():
        for name in [name for name in section if name in flags and flags[name] == service]:
            if name in told:
                raise ValueError(f"{file}: {name} stands there twice, once in [{service}]")
            told[name] = section.pop(name)
        for name, value in section.items():
            try:
                json.dumps(value)
            except TypeError:
                raise ValueError(f"{file}: [{service}] {name}: no setting is a date or a time") from None
    if values := [name for name in SERVICES if name in told]:
        raise ValueError(f"{file}: {values[0]} is a section: write [{values[0]}] above its settings")
    if strange := [name for name in told if name not in flags]:
        near = get_close_matches(strange[0], [*flags, *SERVICES], 1)
        raise ValueError(f"{file}: unknown setting {strange[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return {name: _text(file, name, value) for name, value in told.items()}, further


def _text(file: Path, name: str, value: Any) -> Any:
    """As it would be typed, so that one parser reads all: 2.5 is no whole number in a file either."""
    if isinstance(value, list):
        return [_text(file, name, item) for item in value]
    if isinstance(value, dict):
        raise ValueError(f"{file}: {name} is a value, no section")
    return str(value).lower() if isinstance(value, bool) else str(value)
