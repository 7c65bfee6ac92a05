"""`laps-sd loadtest`: reads flags, writes table, JSON and report. Nothing is sent or computed here."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laps_sd import terminal
from laps_sd.generate import ApiKey, Ca
from laps_sd.generate import Server as ServerOption
from laps_sd.interrupt import INTERRUPTED
from worker_service.outputs import writable

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from laps_sd.client import AsyncClient
    from laps_sd.loadtest.plan import Planned
    from laps_sd.loadtest.record import Record
    from laps_sd.loadtest.target import Served, Server, Target
    from laps_sd.loadtest.timeline import Timeline
    from scheduler_service.sim.workload import Job

REQUESTS = 100  # default without a file
MAX_TOKENS = 128  # default where nothing else bounds an answer
FELL_BEHIND = 3  # exit code: the driver did not keep to its schedule, though there are figures


def loadtest(
    server: ServerOption = "127.0.0.1:50051",
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines or CSV (also .gz). Default: our own prompts, short and long."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Arrivals a second, in place of the file's; inf: all at once.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="The first N; with --rate a file starts over.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.001, help="Shape of the gamma-distributed gaps: 1 is Poisson, less bursty, inf even.")
    ] = 1.0,
    ramp_to: Annotated[float | None, typer.Option(min=1e-6, help="The rate moves from --rate to this.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="In flight at most; without --rate and arrivals (or --rate inf): a closed loop."),
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="How fast the file's clock runs.")] = 1.0,
    spread_s: Annotated[
        float,
        typer.Option(min=0, max=86_400, help="Put each arrival off by up to that: for a coarse clock."),
    ] = 0.0,
    length_scale: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Of the file's token counts; texts stay.")
    ] = 1.0,
    context_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longer requests are clipped. Default: the server's.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Without a file: synthetic prompts and answers of equal lengths.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Where nothing else fixes an output length. Default: 128; our own prompts have bounds from 16 to 512.",
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Texts as they are, without the chat template.")] = False,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Of one request.")] = 600.0,
    ready_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="A server that is not ready is waited for. Default: 60, or 5 if nothing listens."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests at the start that no figure counts.")] = 0,
    slo: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS", help="ttft, tpot or e2el, for goodput; repeatable.")
    ] = None,
    drivers: Annotated[int, typer.Option(min=1, max=256, help="Processes, where one does not keep up.")] = 1,
    openai: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server in place of --server.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of the OpenAI-compatible server.")] = None,
    stats_server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serves Stats, if another port does. Default: --server.")
    ] = None,
    api_key: ApiKey = None,
    ca: Ca = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=writable)] = None,
    with_detail: Annotated[bool, typer.Option("--detail", help="Every request in the JSON.")] = False,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", callback=writable)] = None,
) -> None:
    """Put a server under load and measure it, with the names and definitions of `vllm bench serve`.

    Open loop unless --concurrency closes it: an arrival never waits for an answer, and latency counts from its time.
    """
    settings = {name: _for_json(value) for name, value in locals().items()}
    del settings["api_key"]
    import asyncio

    from laps_sd import machine
    from laps_sd.client import AsyncClient, RequestError
    from laps_sd.loadtest import drivers as fleet
    from laps_sd.loadtest.plan import Planned, arrivals, clipped, plan, repeated, rescaled
    from laps_sd.loadtest.results import detail, parse_slos, summarise, without_times
    from laps_sd.loadtest.show import LATE, table
    from laps_sd.loadtest.target import READY_S, Refused, Server
    from laps_sd.reach import LISTENS_S

    if workload is None and rate is None and concurrency is None:
        raise typer.BadParameter("give --workload, --rate or --concurrency", param_hint="--rate")
    if (openai is None) != (model is None):
        raise typer.BadParameter("--openai and --model go together", param_hint="--openai")
    if openai is not None and stats_server is not None:
        raise typer.BadParameter("goes with --server: nothing is asked beside --openai", param_hint="--stats-server")
    if drivers > min(concurrency or drivers, requests or drivers):
        raise typer.BadParameter("more than requests in flight", param_hint="--drivers")
    if ramp_to is not None and (rate is None or math.isinf(max(rate, ramp_to))):
        raise typer.BadParameter("needs a finite --rate to start from", param_hint="--ramp-to")
    try:
        slos = parse_slos(slo or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    if html_file:
        with terminal.importing_report():
            from laps_sd.loadtest.report import render

    jobs = _jobs(workload, rate, requests, concurrency, prompt_tokens, max_tokens, seed)
    starts_over = rate is not None or not jobs[-1].arrival_s
    jobs = rescaled(jobs, speed=speed, length_scale=length_scale if workload else 1.0, spread_s=spread_s, seed=seed)
    if requests is not None and starts_over:  # behind `rescaled`, which puts them in order of arrival
        jobs = repeated(jobs, requests)
        if rate is None:
            jobs.sort(key=lambda job: job.arrival_s)
    if warmup >= len(jobs):
        raise typer.BadParameter(f"leaves none of {len(jobs)} requests to be counted", param_hint="--warmup")
    due_s: Sequence[float | None] = [job.arrival_s for job in jobs]
    if concurrency is not None and (math.isinf(rate) if rate else not jobs[-1].arrival_s):
        due_s = [None] * len(jobs)  # a closed loop
    elif rate is not None:
        due_s = arrivals(len(jobs), rate, burstiness=burstiness, ramp_to=ramp_to, seed=seed)

    def planned(context: int) -> tuple[list[Planned], int]:
        bound = max_tokens or MAX_TOKENS
        fitting, cut = clipped(jobs, context, bound) if context else (jobs, 0)
        return plan(fitting, due_s, max_tokens=bound, ignore_eos=ignore_eos, warmup=warmup), cut

    asked = Server(
        at=openai or server,
        model=model,
        api_key=api_key,
        ca=str(ca or ""),
        timeout_s=timeout_s,
        ready_s=ready_s or READY_S,
        listens_s=ready_s or LISTENS_S,
        chat=not raw,
        temperature=temperature,
    )
    if openai is not None:
        try:
            fleet.target(asked)
        except Refused as error:
            raise typer.BadParameter(str(error).partition(": ")[2], param_hint="--openai") from None
    try:
        stats = AsyncClient(stats_server or server, api_key=api_key, ca=ca) if openai is None else None
        served, records, timeline, cut = asyncio.run(_run(asked, planned, context_tokens, stats, concurrency, drivers))
    except (Refused, RequestError, fleet.DriverFailed, TimeoutError, OSError) as error:
        words = f"{error.code.name}: {error.message}" if isinstance(error, RequestError) else str(error)
        typer.echo(f"laps-sd: {words or type(error).__name__}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None

    results = summarise(records, slos, ours=openai is None) | {"clipped": cut, "warmup": warmup}
    if not results["completed"]:
        results = without_times(results)
    terminal.console().print(f"{served}; {len(records):,} requests", "", table(results), sep="\n", highlight=False)
    if timeline.missing:
        typer.echo(f"laps-sd: no figures of the server's own: {timeline.missing}", err=True)
    if json_file:
        body = results | {"served_by": asdict(served), "settings": settings, "timeline": timeline.samples}
        body |= {"requests": [detail(record) for record in records]} if with_detail else {}
        json_file.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")
    if html_file:
        about = served.facts() | machine.facts(_without_key(sys.argv[1:]))
        html_file.write_text(render(about, results, records, timeline.samples), encoding="utf-8")
    if not results["kept_up"]:
        typer.echo(f"laps-sd: {LATE}", err=True)
        raise typer.Exit(FELL_BEHIND)
    if not results["completed"]:
        raise typer.Exit(1)


def _jobs(
    workload: Path | None,
    rate: float | None,
    requests: int | None,
    concurrency: int | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    seed: int,
) -> "list[Job]":
    """The jobs in order of arrival: `requests` at most, fewer where a file is short."""
    from laps_sd.loadtest.plan import own, synthetic
    from scheduler_service.sim.workload import WorkloadError, read_workload

    if workload is None and prompt_tokens is not None:
        return synthetic(requests or REQUESTS, prompt_tokens, max_tokens or MAX_TOKENS)
    if workload is None:
        jobs = own(requests or REQUESTS, seed)
        return jobs if max_tokens is None else [replace(job, max_tokens=max_tokens) for job in jobs]
    timed = rate is None and concurrency is None
    try:
        jobs = read_workload(workload, arrivals=timed, lengths=False, note=partial(typer.echo, err=True))
    except WorkloadError as error:
        hint = "; or give --rate or --concurrency" if timed and "arrival_s" in str(error) else ""
        raise typer.BadParameter(f"{error}{hint}", param_hint="--workload") from None
    return jobs[:requests]


async def _run(
    server: "Server",
    planned: "Callable[[int], tuple[list[Planned], int]]",
    context_tokens: int | None,
    stats: "AsyncClient | None",
    concurrency: int | None,
    drivers: int,
) -> "tuple[Served, list[Record], Timeline, int]":
    """Who served, the records, the server's own figures, and how many requests were clipped."""
    from laps_sd.loadtest import drivers as fleet
    from laps_sd.loadtest.show import Bar

    async with AsyncExitStack() as stack:
        if stats is not None:
            await stack.enter_async_context(stats)
        async with fleet.target(server) as target:
            await target.ready()
            served, context = await _about(target, stats)
            requests, cut = planned(context_tokens or context)
            if any(not request.prompt for request in requests):
                server = replace(server, words=await target.words())
        bar = stack.enter_context(Bar(len(requests)))
        records, timeline = await fleet.run(
            server, requests, concurrency=concurrency, drivers=drivers, stats=stats, watch=bar.watch
        )
    return served, records, timeline, cut


async def _about(target: "Target", stats: "AsyncClient | None") -> "tuple[Served, int]":
    """Who serves, and its context in tokens: 0 if it does not say."""
    from laps_sd.client import RequestError
    from laps_sd.loadtest.target import Served

    at = target.server.at
    if stats is None:
        return Served(at, target.server.model or ""), target.context_tokens
    try:
        said = await stats.stats()
    except RequestError as error:
        return Served(at, "", f"not told ({error.code.name})"), target.context_tokens
    return Served(at, said.model, said.policy), said.context_tokens


def _for_json(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, Path) or (isinstance(value, float) and math.isinf(value)) else value


def _without_key(words: Sequence[str]) -> list[str]:
    hidden = []
    for before, word in zip(["", *words], words, strict=False):
        hidden.append("..." if before == "--api-key" else "--api-key=..." if word.startswith("--api-key=") else word)
    return hidden
