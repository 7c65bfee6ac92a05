"""Docker or podman, whichever is installed and works: images, the stack as compose runs it, and its processes. What is
tried with them is decided elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
BUILD_S, COMMAND_S = 3600.0, 300.0
POLL_S = 0.1


class EngineError(Exception):
    """A command of the engine failed; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Engine:
    program: str  # docker or podman
    compose: tuple[str, ...]
    environment: Mapping[str, str]  # of compose: the file's variables
    files: tuple[Path, ...]
    project: str

    def build(self, target: str, arguments: Mapping[str, str]) -> None:
        """The image of a stage, as docker-compose.yml builds it."""
        command = [self.program, "build", "--file", "deploy/Dockerfile", "--target", target]
        command += ["--tag", f"laps-sd/{target}:0.1.0"]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        if self.program == "podman":
            command += ["--isolation=chroot", "--layers", "--pull=missing", *_pip_of_this_machine()]
        self._run([*command, "."], BUILD_S)

    def size_mb(self, image: str) -> float:
        return int(self._run([self.program, "image", "inspect", "--format", "{{.Size}}", image])) / 1e6

    def has(self, image: str) -> bool:
        inspect = [self.program, "image", "inspect", image]
        return subprocess.run(inspect, capture_output=True, timeout=COMMAND_S).returncode == 0

    def up(self) -> None:
        self._run([*self._stack(), "up", "--detach", *(["--no-build"] if self.program == "docker" else [])], BUILD_S)

    def down(self) -> None:
        """With the volumes."""
        self._run([*self._stack(), "down", "--volumes"])

    def execute(self, service: str, *command: str) -> str:
        return self._run([self.program, "exec", self.container(service), *command])

    def healthy(self, service: str) -> bool:
        """As its health check says, asked now."""
        check = self._inspected(service)["Config"]["Healthcheck"]["Test"][1:]
        asked = [self.program, "exec", self.container(service), *check]
        return subprocess.run(asked, capture_output=True, timeout=COMMAND_S).returncode == 0

    def until_healthy(self, services: Sequence[str], timeout_s: float) -> None:
        """Returns once all are. Raises EngineError."""
        until = time.monotonic() + timeout_s
        for service in services:
            while not self.healthy(service):
                if time.monotonic() > until:
                    raise EngineError(f"{service} is not healthy after {timeout_s:g} s: {self.logs(service)[-2000:]}")
                time.sleep(POLL_S)

    def logs(self, service: str) -> str:
        done = subprocess.run([self.program, "logs", self.container(service)], capture_output=True, timeout=COMMAND_S)
        return (done.stdout + done.stderr).decode(errors="replace")

    def container(self, service: str) -> str:
        separator = "-" if self.program == "docker" else "_"
        return separator.join((self.project, service, "1"))

    def pid(self, service: str) -> int:
        """Of its main process, on this machine; 0: it does not run, or is about to end or to start."""
        try:
            state = self._inspected(service)["State"]
        except EngineError:  # podman asks the system of a process that just died
            return 0
        found = int(str(state["Pid"])) if state["Running"] else 0
        return found if Path(f"/proc/{found}").exists() else 0

    def kill(self, service: str) -> int:
        """kill -9 of its main process, behind the engine's back. Returns that process."""
        os.kill(pid := self.pid(service), signal.SIGKILL)
        return pid

    def back(self, service: str, killed: int, patience_s: float) -> bool:
        """Returns once it runs again: True if its restart policy did that within `patience_s`, else it is started."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if self.pid(service) not in (0, killed):
                return True
            time.sleep(POLL_S)
        self._run([self.program, "start", self.container(service)])
        return False

    def _inspected(self, service: str) -> dict[str, dict[str, object]]:
        found: list[dict[str, dict[str, object]]] = json.loads(
            self._run([self.program, "container", "inspect", self.container(service)])
        )
        return found[0]

    def _stack(self) -> list[str]:
        words = [*self.compose, "--project-name", self.project]
        for file in self.files:
            words += ["--file", str(file)]
        return words

    def _run(self, command: Sequence[str], timeout_s: float = COMMAND_S) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            words = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise EngineError(f"{' '.join(command)}: exit status {done.returncode}\n{words}")
        return done.stdout.strip()


def find() -> tuple[str, tuple[str, ...]] | None:
    """The engine and its compose, if both work here."""
    pairs = [
        ("docker", ("docker", "compose")),
        ("podman", ("podman-compose",)),
        ("podman", (sys.executable, "-m", "podman_compose")),
    ]
    for program, compose in pairs:
        works = [(program, "info"), (*compose, "version")]
        if all(shutil.which(command[0]) and _succeeds(command) for command in works):
            return program, compose
    return None


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=COMMAND_S).returncode == 0


def _pip_of_this_machine() -> list[str]:
    """Mounts for a build, so that its pip asks the indexes that ours asks, and trusts whom ours trusts."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=COMMAND_S
    )
    told: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        told[name.rpartition(".")[2]] = value.strip("'\"")
    folders = set()
    for word in " ".join(told.values()).replace("\\n", " ").split():
        path = Path(urlsplit(word).path if word.startswith("file://") else word)
        if path.is_absolute() and path.exists():
            folders.add(path.parent if path.is_file() or path.name == "simple" else path)
    file = ROOT / "build" / "containers" / "pip.conf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in told.items() if value))
    mounts = {**{folder: folder for folder in folders}, file: Path("/etc/pip.conf")}
    return [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]
