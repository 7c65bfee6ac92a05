"""`laps-sd up` for people: phases and short lines on a terminal; for programs: JSON and one line, as ever."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laps_sd.options import Options
from laps_sd.up_screen import Screen, for_people, how_to_use

WHEN = "2026-11-22T18:55:02.376645Z"

# `up`, with a stack that only logs three lines and is ready at once.
UP = """
import asyncio, sys
from types import SimpleNamespace
from laps_sd import serve
class Stack:
    grpc, http, scheduler = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"
    async def ready(self): pass
async def use_for_a_moment(use):
    try:
        await asyncio.wait_for(use(Stack()), 0.01)
    except TimeoutError:
        pass
def run_stack(options, use, emit=lambda line: sys.stderr.buffer.write(line)):
    emit(b'{"service": "up", "event": "starting"}\\n')
    asyncio.run(use_for_a_moment(use))
serve.run_stack = run_stack
sys.argv = ["laps-sd", "up", "--grpc-port", "0", "--http-port", "0"]
from laps_sd.__main__ import main
main()
"""


def entry(service: str, event: str, **further: Any) -> bytes:
    return json.dumps({"service": service, **further, "event": event, "level": "info"}).encode() + b"\n"


def shown(*lines: bytes) -> str:
    """What stands on the terminal in the end."""
    file = io.StringIO()
    with Screen(Console(file=file, width=200), Options()) as screen:
        for line in lines:
            screen.emit(line)
        screen.ready("127.0.0.1:50051", "127.0.0.1:8080", "127.0.0.1:7003")
    return file.getvalue()


def test_each_phase_is_told_with_its_time_and_none_comes_twice() -> None:
    workers = [entry("worker", event, worker=f"worker-{i}") for event in ("loading", "warming_up") for i in range(2)]
    text = shown(entry("up", "starting"), entry("scheduler", "leading"), *workers, entry("worker", "loading"))
    phases = [line.partition(" s  ")[2] for line in text.splitlines() if " s  " in line]
    assert phases == [
        "starting Redis and the services",
        "the worker loads its libraries",
        "the worker loads the model",
        "the worker warms up and measures what steps cost",
    ]


def test_the_end_is_an_address_and_commands_to_copy_with_the_served_name() -> None:
    text = shown(entry("gateway", "model", name="its-name"))
    assert "ready after" in text
    assert "http://127.0.0.1:8080" in text
    assert "laps-sd generate 'Why is the sky blue?'\n" in text
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in text
    assert '"model": "its-name"' in text


def test_with_keys_and_certificates_the_commands_say_so() -> None:
    options = Options(certs=Path("/certs"), api_keys=Path("/keys"))
    *_, generate, curl, more, _ = how_to_use(options, "m", "127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003")
    assert generate.endswith("--server 127.0.0.1:7001 --ca /certs/gateway/ca.crt")
    assert "https://127.0.0.1:7002/" in curl
    assert "--cacert /certs/gateway/ca.crt" in curl
    assert "Bearer $LAPS_SD_API_KEY" in curl
    assert more.endswith("laps-sd worker --join 127.0.0.1:7003 --certs /certs")


def test_more_workers_are_asked_of_this_stack_and_for_its_model() -> None:
    *_, usual, _ = how_to_use(Options(), "smollm2-135m", "127.0.0.1:50051", "127.0.0.1:8080", "127.0.0.1:7003")
    assert usual == "More workers: laps-sd scale N; or, of this machine, laps-sd worker --join 127.0.0.1:7003"
    options = Options(model="my models/one", certs=Path("/my certs"))  # of any port
    *_, more, _ = how_to_use(options, "one", "127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003,127.0.0.1:7004")
    assert "laps-sd scale N --grpc-port 7001;" in more
    joins = "--join 127.0.0.1:7003,127.0.0.1:7004 --model 'my models/one' --certs '/my certs'"
    assert more.endswith(f"laps-sd worker {joins}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"service": "worker", "worker": "worker-0", "event": "warmed"}, ["worker-0", "warmed"]),
        ({"service": "gateway", "request_id": "r7", "event": "ended"}, ["gateway", "ended", "request_id=r7"]),
        ({"service": "redis", "words": "Ready", "event": "printed"}, ["redis", "Ready"]),
        ({"service": "scheduler", "worker": "w", "event": "attached"}, ["scheduler", "attached", "worker=w"]),
    ],
)
def test_an_entry_is_one_line_for_people(line: dict[str, Any], words: list[str]) -> None:
    assert for_people({**line, "level": "info", "timestamp": WHEN}).plain.split()[1:] == words


def test_programs_get_the_line_and_the_log_as_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", UP], capture_output=True, text=True)
    assert ended.stdout == "ready grpc=127.0.0.1:1 http=127.0.0.1:2 scheduler=127.0.0.1:3\n"
    assert ended.stderr == '{"service": "up", "event": "starting"}\n'


def test_a_terminal_gets_what_is_for_people() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", UP], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while chunk := _read(ours):
        text += chunk
    assert process.wait() == 0
    assert b"ready after" in text
    assert b"ready grpc=" not in text
    assert b"starting Redis and the services" in text


def _read(terminal: int) -> bytes:
    """Empty at its end, which Linux tells by an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""
