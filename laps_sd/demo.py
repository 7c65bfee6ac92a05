"""`laps-sd demo`: runs the stack on the real model, and sends twelve prompts at once under one policy after the other.
What is shown of it is made in demo_view.py."""

import asyncio
import io
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import typer
from platformdirs import user_log_dir
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.live import Live
from rich.text import Text

from laps_sd import terminal
from laps_sd.client import AsyncClient, Collector, RequestError
from laps_sd.demo_view import Answer, Run, asked_for, streams, tell
from laps_sd.options import Device, Options
from laps_sd.serve import run_stack
from laps_sd.stack import Stack
from protos.bounds import Dtype
from scheduler_service.core.policies import make_policy, policy_name

ANSWER_TIMEOUT_S = 300.0
REFRESH_S = 0.2
BASE = "fcfs"
MOST_ONCE_S = 20.0  # if one run of each policy takes longer, there is no second: the demo stays short
PICTURE_WIDTH = 100  # characters

# Short and long; chat, code and reasoning. Some answers repeat themselves: there n-gram drafts are accepted.
PROMPTS = (
    ("Write a Python function that checks whether a number is prime, with comments.", 200),
    ("Tell a story about a lighthouse keeper who befriends a whale.", 200),
    ("What is the capital of France?", 16),
    ("Write an HTML table of the numbers from 1 to 8 and their squares.", 200),
    ("A train covers 120 km in 90 minutes. What is its average speed? Think step by step.", 120),
    ("Who wrote Romeo and Juliet?", 24),
    ("List the months of the year, each with the number of its days.", 140),
    ("Say good morning in Spanish.", 16),
    ("Repeat five times: the short request overtakes the long one.", 90),
    ("Name three primary colors.", 32),
    ("Why is the sky blue? Answer in two sentences.", 70),
    ("Write a SQL query that counts the orders of each customer.", 100),
)


def run_demo(model: str, policy: str, device: Device, dtype: Dtype, picture: Path | None) -> None:
    """Shows it on the terminal; `picture`: a file for what it told. Raises typer.Exit, typer.BadParameter."""
    try:
        alone = policy_name(make_policy(policy, ())) == BASE
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from None
    console = terminal.console()
    started = time.monotonic()
    runs: list[Run] = []
    options = Options(
        model=model, policy=BASE, device=device, dtype=dtype, workers=2, slots=2, grpc_port=0, http_port=0
    )

    async def show(stack: Stack) -> None:
        with console.status("starting Redis, scheduler, two workers, gateway"):
            await stack.ready()
        ready_s = time.monotonic() - started
        console.print(f"ready after {ready_s:.1f} s: {len(PROMPTS)} prompts at once, 2 x 2 slots", highlight=False)
        runs.append(await _run(console, stack, "first come, first served"))
        if alone:
            return
        await stack.order_by(policy)
        runs.append(await _run(console, stack, "the same again, ordered"))
        if time.monotonic() - started - ready_s > MOST_ONCE_S:
            return
        with console.status("both once more, fcfs last: the machine's speed may change"):
            runs.append(await _run(None, stack))
            await stack.order_by(BASE)
            runs.append(await _run(None, stack))

    with _log() as log:
        finished = run_stack(options, show, emit=log.write)
    if not finished:
        console.print("interrupted; the stack is down")
        raise typer.Exit(130)
    if not console.is_terminal:
        _tell_answers(console, asked_for(runs)[0])
    tell(console, runs)
    console.print(
        f"the stack is down again; all in all {time.monotonic() - started:.1f} s; its logs: {log.name}", highlight=False
    )
    if picture is not None:
        draw(picture, runs)
    if not all(run.finished for run in runs):
        raise typer.Exit(1)


def _log() -> Any:
    """A file for the services' logs, in the home directory if that can be written."""
    try:
        return Path(user_log_dir("laps-sd", ensure_exists=True), "demo.log").open("wb", buffering=0)
    except OSError:
        return NamedTemporaryFile(prefix="laps-sd-demo-", suffix=".log", buffering=0, delete=False)


async def _run(console: Console | None, stack: Stack, title: str = "") -> Run:
    """All prompts at once. `console`: a terminal, on which their streams are shown."""
    answers = [Answer(prompt, max_tokens) for prompt, max_tokens in PROMPTS]
    async with stack.client() as client:
        policy = (await client.stats()).policy
        if console is not None and console.is_terminal:
            console.print(f"\n[bold]{title}[/] ({policy})", highlight=False)
            await _show_live(console, client, answers)
        else:
            await asyncio.gather(*(_stream(client, answer) for answer in answers))
        return Run(policy, answers, await client.stats())


def _tell_answers(console: Console, run: Run) -> None:
    """A line for each, for programs that read them."""
    for answer in run.answers:
        text = answer.error or " ".join("".join(answer.collector.text).split())
        console.print(Text(f"{answer.state:>7} | {answer.prompt} | {text}"), soft_wrap=True)


async def _stream(client: AsyncClient, answer: Answer) -> None:
    answer.collector = Collector()  # its clock starts now
    try:
        messages = [{"role": "user", "content": answer.prompt}]
        async for chunk in client.generate(messages=messages, max_tokens=answer.max_tokens, timeout_s=ANSWER_TIMEOUT_S):
            answer.collector.add(chunk)
            if answer.state == "waiting":
                answer.state = "running"
        answer.completion = answer.collector.completion()
        answer.state = "done"
    except RequestError as error:
        answer.error, answer.state = f"{error.code.name}: {error.message}", "failed"


async def _show_live(console: Console, client: AsyncClient, answers: list[Answer]) -> None:
    running = asyncio.gather(*(_stream(client, answer) for answer in answers))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not running.done():
            live.update(streams(answers, console.width), refresh=True)
            await asyncio.wait([running], timeout=REFRESH_S)
            await asyncio.gather(*(_refresh_state(client, answer) for answer in answers))
    await running
    console.print(streams(answers, console.width))


async def _refresh_state(client: AsyncClient, answer: Answer) -> None:
    if answer.collector.request_id and answer.state in ("running", "paused"):
        with suppress(RequestError):
            status = await client.status(answer.collector.request_id)
            if answer.state in ("running", "paused") and status.state in ("running", "paused"):
                answer.state = status.state


def draw(picture: Path, runs: Sequence[Run]) -> None:
    """The answers of the policy that was asked for, and all figures, as an SVG that asks no other host for fonts."""
    console = Console(width=PICTURE_WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print(streams(asked_for(runs)[0].answers, PICTURE_WIDTH))
    console.print()
    tell(console, runs)
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture.write_text(console.export_svg(title="make demo", code_format=form) + "\n", encoding="utf-8")
