"""The folder of a comparison: a file for each run, so that a stopped comparison can go on. Computes nothing."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laps_sd.compare.design import Run, Settings

SETTINGS, RUNS, TAUGHT, LOG = "settings.json", "runs", "taught", "services.log"


class OtherSettings(Exception):
    """The runs in the folder were made with other settings; the message says which differ."""


class Damaged(Exception):
    """A file of the folder cannot be read; the message says which."""


class Folder:
    def __init__(self, path: Path, settings: Settings) -> None:
        """Creates the folder if it is not there. Raises OtherSettings, Damaged, OSError."""
        self.path, self.log = path, path / LOG
        self._runs = path / RUNS
        asked = json.loads(json.dumps(asdict(settings)))
        self._runs.mkdir(parents=True, exist_ok=True)
        file = path / SETTINGS
        if not file.exists():
            write(file, asked)
            return
        self.check_equal(read(file), asked)

    def check_equal(self, kept: dict[str, Any], asked: dict[str, Any]) -> None:
        """Raises OtherSettings if these runs cannot be compared with those that are kept."""
        if differ := sorted(name for name in asked.keys() | kept.keys() if asked.get(name) != kept.get(name)):
            raise OtherSettings(
                f"{self.path} holds runs with another {', '.join(differ)}: they cannot be compared with these. Take "
                "another folder, or the settings (and the code) that it was made with"
            )

    @property
    def taught(self) -> Path:
        """Redis's data with what the predictor knows at the start of every run."""
        return self.path / TAUGHT

    def has(self, run: Run, *, faulty: bool) -> bool:
        """Whether the folder has the run. `faulty`: also if the run had faults."""
        file = self._file(run)
        return file.exists() and (faulty or not read(file)["faults"])

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return read(self._file(run))

    def add(self, run: Run, figures: dict[str, Any]) -> None:
        write(self._file(run), {"run": run.as_json()} | figures)

    def _file(self, run: Run) -> Path:
        return self._runs / f"{run.name}.json"


def settings_of(path: Path) -> dict[str, Any]:
    return read(path / SETTINGS)


def runs_of(path: Path) -> Iterator[dict[str, Any]]:
    """All runs of the folder. Raises Damaged."""
    for file in sorted((path / RUNS).glob("*.json")):
        yield read(file)


def read(file: Path) -> dict[str, Any]:
    """Raises Damaged."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        raise Damaged(f"{file} holds no JSON; a run whose file is removed is made anew") from None
    return found


def write(file: Path, what: dict[str, Any]) -> None:
    """Writes the file whole or not at all, even if this process is killed or the machine stops."""
    draft = file.with_suffix(".part")
    with draft.open("w") as text:
        text.write(json.dumps(what) + "\n")
        text.flush()
        os.fsync(text.fileno())
    draft.replace(file)
