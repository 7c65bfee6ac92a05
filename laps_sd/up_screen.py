"""`laps-sd up` on a terminal: which phase the start is in, the services' logs as short lines for people, and at the end
where the service is reached and what to type. Where there is no terminal logs stay JSON, and this is not used."""

import json
import shlex
import sys
import time
from datetime import datetime
from typing import Any, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from laps_sd.options import Options
from laps_sd.ports import HOST

# The phases of a start in their order, each from this entry of the log on: (service, event).
PHASES = {
    ("up", "starting"): "starting Redis and the services",
    ("scheduler", "leading"): "the worker loads its libraries",
    ("worker", "loading"): "the worker loads the model",
    ("worker", "warming_up"): "the worker warms up and measures what steps cost",
    ("worker", "warmed"): "the gateway gets the model's tokenizer",
}
_ORDER = list(PHASES)
_NOT_REPEATED = ("service", "level", "event", "timestamp", "words")
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}
PROMPT = "Why is the sky blue?"
MAX_TOKENS = 128  # without it an answer may fill what is left of the context
_LONGEST = 100  # characters of one value of an entry


def is_wanted() -> bool:
    """Whether people look: a program that reads either output gets the lines that are made for programs."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class Screen:
    """`emit` takes each line of the log, `ready` tells where the service is. Phases are shown while it is entered."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console, self._options = console, options
        self._began = self._phase_began = time.monotonic()
        self._phase = -1  # index in _ORDER
        self._status = Status("", console=console)
        self._model = options.model  # the name that it is served under, once a gateway tells

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def emit(self, line: bytes) -> None:
        entry = json.loads(line)
        key = (entry.get("service"), entry.get("event"))
        if key == ("gateway", "model"):
            self._model = entry["name"]
        # One of several workers is the first to get on, and only ever forward.
        if key in PHASES and (phase := _ORDER.index(key)) > self._phase and not self._is_over:
            self._end_phase()
            self._phase, self._phase_began = phase, time.monotonic()
            self._status.update(PHASES[key])
            self._status.start()
        self._console.print(for_people(entry), soft_wrap=True)

    def ready(self, grpc: str, http: str, scheduler: str) -> None:
        self._end_phase()
        self._phase = len(_ORDER)
        self._status.stop()
        self._console.print(f"ready after {time.monotonic() - self._began:.1f} s", style="bold green", highlight=False)
        for line in how_to_use(self._options, self._model, grpc, http, scheduler):
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def _is_over(self) -> bool:
        return self._phase == len(_ORDER)

    def _end_phase(self) -> None:
        if 0 <= self._phase < len(_ORDER):
            took_s = time.monotonic() - self._phase_began
            self._console.print(f"{took_s:6.1f} s  {PHASES[_ORDER[self._phase]]}", style="cyan", highlight=False)


def for_people(entry: dict[str, Any]) -> Text:
    """One line: time, who, what, and the rest as name=value."""
    moment = str(entry.get("timestamp", ""))
    with_clock = datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S") if moment else "        "
    by_worker = entry.get("service") == "worker" and "worker" in entry
    who = str(entry["worker"] if by_worker else entry.get("service", ""))
    what = str(entry.get("words") or entry.get("event", ""))
    style = _STYLES.get(str(entry.get("level", "")), "")
    line = Text(f"{with_clock} ", style="dim")
    line.append(f"{who:<10} ", style="blue").append(what, style=style or "bold")
    for name, value in entry.items():
        if name not in _NOT_REPEATED and not (by_worker and name == "worker"):
            line.append(f" {name}=", style="dim").append(_short(value), style=style)
    return line


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def how_to_use(options: Options, model: str, grpc: str, http: str, scheduler: str) -> list[str]:
    """Where the service is reached, and commands to copy."""
    url = f"{'https' if options.certs else 'http'}://{http}"
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS}
    curl = ["curl", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body)]
    generate = ["laps-sd", "generate", PROMPT]
    scale, worker = ["laps-sd", "scale", "N"], ["laps-sd", "worker", "--join", scheduler]
    if grpc != f"{HOST}:{Options().grpc_port}":
        generate += ["--server", grpc]
        scale += ["--grpc-port", grpc.rpartition(":")[2]]
    if options.model != Options().model:
        worker += ["--model", options.model]
    if options.certs:
        ca = f"{options.certs}/gateway/ca.crt"
        generate += ["--ca", ca]
        curl += ["--cacert", ca]
        worker += ["--certs", str(options.certs)]
    # Not quoted, for the shell is to put the key in; `generate` takes it from the environment.
    key = ' -H "authorization: Bearer $LAPS_SD_API_KEY"' if options.api_keys else ""
    return [
        f"OpenAI's API and the live page: {url}   gRPC: {grpc}",
        *(["put a key into LAPS_SD_API_KEY first: laps-sd key new --help"] if key else []),
        f"  {shlex.join(generate)}",
        f"  {shlex.join(curl)}{key}",
        f"More workers: {shlex.join(scale)}; or, of this machine, {shlex.join(worker)}",
        "Ctrl-C ends it.",
    ]
