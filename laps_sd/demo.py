"""`laps-sd demo`: runs the stack on the real model, sends twelve prompts at once, shows their streams and figures."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer
from platformdirs import user_log_dir
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laps_sd import terminal
from laps_sd.client import AsyncClient, Collector, Completion, RequestError, Stats
from laps_sd.options import Device, Options
from laps_sd.serve import run_stack
from laps_sd.stack import Stack
from protos.bounds import Dtype

ANSWER_TIMEOUT_S = 300.0
REFRESH_S = 0.2

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


@dataclass(slots=True)
class Answer:
    """One request as its client sees it. `state` comes from the server, which is asked at every refresh."""

    prompt: str
    max_tokens: int
    state: str = "waiting"
    collector: Collector = field(default_factory=Collector)
    completion: Completion | None = None
    error: str = ""

    @property
    def rounds(self) -> int:
        return self.collector.final.rounds if self.collector.final is not None else 0


def run_demo(model: str, policy: str, device: Device, dtype: Dtype) -> None:
    """Shows it on the terminal. Raises typer.Exit."""
    console = terminal.console()
    started = time.monotonic()
    answers = [Answer(prompt, max_tokens) for prompt, max_tokens in PROMPTS]
    stats: list[Stats] = []
    options = Options(
        model=model, policy=policy, device=device, dtype=dtype, workers=2, slots=2, grpc_port=0, http_port=0
    )

    async def show(stack: Stack) -> None:
        with console.status("starting Redis, scheduler, two workers, gateway"):
            await stack.ready()
        console.print(
            f"ready after {time.monotonic() - started:.1f} s: {len(answers)} prompts at once, {policy}, 2 x 2 slots"
        )
        await (_show_live if console.is_terminal else _show_lines)(console, stack.grpc, answers)
        async with AsyncClient(stack.grpc) as client:
            stats.append(await client.stats())

    log_file = Path(user_log_dir("laps-sd", ensure_exists=True), "demo.log")
    with log_file.open("wb", buffering=0) as log:
        finished = run_stack(options, show, emit=log.write)
    if not finished:
        console.print("interrupted; the stack is down")
        raise typer.Exit(130)
    console.print(_statistics(answers), _totals(answers), _scheduling(*stats), sep="\n", highlight=False)
    console.print(
        f"the stack is down again; all in all {time.monotonic() - started:.1f} s; its logs: {log_file}", highlight=False
    )
    if any(answer.completion is None for answer in answers):
        raise typer.Exit(1)


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


async def _show_lines(console: Console, target: str, answers: list[Answer]) -> None:
    async def one(client: AsyncClient, answer: Answer) -> None:
        await _stream(client, answer)
        text = answer.error or " ".join("".join(answer.collector.text).split())
        console.print(Text(f"{answer.state:>7} | {answer.prompt} | {text}"), soft_wrap=True)

    async with AsyncClient(target) as client:
        await asyncio.gather(*(one(client, answer) for answer in answers))


async def _show_live(console: Console, target: str, answers: list[Answer]) -> None:
    async with AsyncClient(target) as client:
        streams = asyncio.gather(*(_stream(client, answer) for answer in answers))
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not streams.done():
                live.update(_streams(answers, console.width), refresh=True)
                await asyncio.wait([streams], timeout=REFRESH_S)
                await asyncio.gather(*(_refresh_state(client, answer) for answer in answers))
        await streams
    console.print(_streams(answers, console.width))


async def _refresh_state(client: AsyncClient, answer: Answer) -> None:
    if answer.collector.request_id and answer.state in ("running", "paused"):
        with suppress(RequestError):
            status = await client.status(answer.collector.request_id)
            if answer.state in ("running", "paused") and status.state in ("running", "paused"):
                answer.state = status.state


_COLORS = {"waiting": "dim", "running": "green", "paused": "yellow", "done": "bold", "failed": "red"}


def _streams(answers: list[Answer], width: int) -> Table:
    """`width`: of the terminal, in characters. Only as much of the end of each answer is shown as fits."""
    tail_characters = max(10, (width - 20) * 3 // 5 - 1)
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("state", width=8)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("answer, its end", ratio=3, no_wrap=True)
    for answer in answers:
        tail = " ".join("".join(answer.collector.text).split())[-tail_characters:]
        state = Text(answer.state, style=_COLORS[answer.state])
        table.add_row(state, str(len(answer.collector.token_ids)), Text(answer.prompt), Text(answer.error or tail))
    return table


def _statistics(answers: list[Answer]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("prompt", no_wrap=True, max_width=26)
    for name in ("tokens", "accepted", "rounds", "preempted", "queue s", "latency s"):
        table.add_column(name, justify="right", min_width=len(name))
    for answer in answers:
        if (done := answer.completion) is None:
            table.add_row(Text(answer.prompt), Text(answer.error or "unfinished"))
            continue
        times = (f"{time_ms / 1e3:.2f}" for time_ms in (done.timings_ms.queue, done.timings_ms.e2el))
        accepted = _share(done.spec_decode.num_accepted_tokens, done.spec_decode.num_draft_tokens)
        table.add_row(
            Text(answer.prompt), str(len(done.token_ids)), accepted, str(answer.rounds), str(done.preemptions), *times
        )
    return table


def _totals(answers: list[Answer]) -> Group:
    done = [answer.completion for answer in answers if answer.completion is not None]
    if not done:
        return Group("no answer was finished")
    tokens = sum(len(answer.token_ids) for answer in done)
    seconds = max(answer.timings_ms.e2el for answer in done) / 1e3
    mean_ms = sum(answer.timings_ms.e2el for answer in done) / len(done)
    accepted = sum(answer.spec_decode.num_accepted_tokens for answer in done)
    drafted = sum(answer.spec_decode.num_draft_tokens for answer in done)
    preempted, preemptions = sum(a.preemptions > 0 for a in done), sum(a.preemptions for a in done)
    return Group(
        f"{len(done)} of {len(answers)} finished: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s; "
        f"drafts {accepted} of {drafted} accepted ({_share(accepted, drafted)})",
        f"mean latency {mean_ms:.0f} ms; {preempted} preempted and resumed, {preemptions} times in all",
    )


def _scheduling(stats: Stats) -> str:
    outside = max((worker.outside_forward_share for worker in stats.workers), default=0.0)
    idle = max((worker.idle_share for worker in stats.workers), default=0.0)
    p50_ms, p99_ms = (1e3 * one.total_seconds() for one in (stats.report_to_command_p50, stats.report_to_command_p99))
    return (
        f"report to command: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms; "
        f"the model waited {idle:.1%} of the time, {outside:.1%} was outside forward passes"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
