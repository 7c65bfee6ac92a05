"""`laps-sd compare`: reads flags, makes missing runs, writes table, JSON and report. How a run is made, and what its
figures are, is not known here."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laps_sd import terminal
from laps_sd.interrupt import INTERRUPTED
from laps_sd.options import Options, check_drafter
from laps_sd.own_prompts import BOUNDS
from protos.bounds import Dtype
from worker_service.outputs import writable

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from laps_sd.compare.design import Cell, Settings
    from laps_sd.compare.folder import Folder

MAX_TOKENS = ",".join(map(str, BOUNDS))
QUICK_REQUESTS, QUICK_TAUGHT = 36, 48


def compare(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Keeps every run; the same command goes on there.")],
    policies: Annotated[
        str, typer.Option(metavar="P,P,...", help="Each a name, or name:setting=value:... fcfs is always among them.")
    ] = "fcfs,laps-sd,gittins",
    slots: Annotated[str, typer.Option(metavar="N,N", help="Of the worker: requests in one round.")] = "2",
    load: Annotated[
        str,
        typer.Option(metavar="L,L,...", help="Shares of the capacity, which is measured first; burst: all at once."),
    ] = "0.85",
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="P@SLOTS:LOAD", help="A further policy at one point, as sjf@2:0.85; repeatable."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=12, max=100_000, help="Of a run. Default: 1100.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Each with requests of its own. Default: 3.")] = None,
    workload: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="JSON Lines (.gz) with `prompt` and `kind` (chat, code, reasoning); repeatable."
        ),
    ] = None,
    longest_prompt: Annotated[int, typer.Option(min=1, help="Characters; longer prompts are left out.")] = 500,
    max_tokens: Annotated[
        str, typer.Option(metavar="N,N,...", help="Each request's bound is drawn from these.")
    ] = MAX_TOKENS,
    paragraphs: Annotated[
        str, typer.Option(metavar="KIND,KIND", help="Kinds whose answers end with their first paragraph; or none.")
    ] = "chat,reasoning",
    taught: Annotated[
        int | None, typer.Option(min=40, help="Other requests that the predictor learns from first. Default: 300.")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    drafter: Annotated[str, typer.Option(metavar="none|ngram|PATH|default", help="As of `laps-sd up`.")] = "default",
    draft_len: Annotated[int, typer.Option(min=0, max=64, help="Tokens drafted per round, the same for all.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 where it is native.")] = "auto",
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...",
            help="Be as fast as a machine with these costs, not faster: named as the flags of `laps-sd simulate` "
            "(t_verify_ms, t_verify_slope, t_token_ms, t_draft_ms, t_prefill_ms_per_token). On a machine that is not "
            "always equally fast, something above what its steps cost.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, bounds, arrivals and orders.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no run that would end later; 0: only tell what there is.")
    ] = None,
    keep_faulty: Annotated[
        bool, typer.Option("--keep-faulty", help="Count runs that were disturbed, too: on a machine that others use.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first taste: few requests, one repetition. No evidence.")
    ] = False,
    recordings: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            metavar="FOLDER",
            help="Write the requests as they went under fcfs, for `laps-sd simulate`.",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=writable)] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", callback=writable)] = None,
) -> None:
    """Run the live stack under one policy after the other, with the same requests at the same times, and compare.

    Each run is a service of its own: Redis, scheduler, worker, gateway. All predictors were taught the same answers.
    """
    from laps_sd.compare import identity, live, prompts
    from laps_sd.compare.design import BASE, Cell, Drawn, Settings, check_load, runs
    from laps_sd.compare.folder import Damaged, Folder, OtherSettings, runs_of
    from laps_sd.compare.pace import for_worker, pace_of
    from laps_sd.compare.work import Work
    from worker_service.model_files import ModelError
    from worker_service.prompts import PromptError

    bounds, many = _numbers(max_tokens, "--max-tokens"), _numbers(slots, "--slots")
    if unknown := sorted({*paragraphs.split(",")} - {"none", *prompts.KINDS}):
        told = f"{', '.join(map(repr, unknown))}: none of {', '.join(prompts.KINDS)}"
        raise typer.BadParameter(told, param_hint="--paragraphs")
    try:
        loads = [check_load(text.strip()) for text in load.split(",")]
        extras = [_extra(text) for text in also or ()]
        names = list(dict.fromkeys([BASE, *(_canonical(text) for text in policies.split(","))]))
        device = pace_of(pace) if pace is not None else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policies, --load, --also, --pace") from None
    try:
        found_drafter = check_drafter(drafter)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--drafter") from None
    options = Options(
        model=model,
        drafter=found_drafter,
        draft_len=draft_len,
        dtype=dtype,
        max_backlog_s="inf",
        pace=for_worker(device) if device else None,
    )
    if html_file:
        with terminal.importing_report():
            from laps_sd.compare import page  # noqa: F401
    try:
        pool = prompts.prompts_of(workload or [], longest_prompt)
    except PromptError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from None
    settings = Settings(
        model=model,
        dtype=dtype,
        drafter=drafter,
        draft_len=draft_len,
        requests=requests or (QUICK_REQUESTS if quick else 1100),
        max_tokens=tuple(bounds),
        paragraphs=tuple(kind for kind in paragraphs.split(",") if kind != "none"),
        taught=taught or (QUICK_TAUGHT if quick else 300),
        seed=seed,
        pace=device,
        prompts=prompts.digest(pool),
        code=identity.serving_code(),
    )
    try:
        drawn = Drawn(pool, settings)
        folder = Folder(out, settings)
        work = Work(folder, drawn, settings, options, tolerant=keep_faulty or quick)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from None
    except (OtherSettings, Damaged, OSError) as error:
        typer.echo(f"laps-sd: {error}", err=True)
        raise typer.Exit(1) from None
    try:
        for made in runs_of(out):  # the tables show each policy of the folder beside its simulation
            identity.policy_code(made["run"]["policy"])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    cells = {Cell(number, load): list(names) for number in many for load in loads}
    for name, cell in extras:
        cells[cell] = list(dict.fromkeys([*cells.get(cell, [BASE]), name]))
    asked = list(dict.fromkeys(runs(cells, repetitions or (1 if quick else 3), seed)))
    try:
        left = work.through(asked, minutes)
    except live.Interrupted:
        typer.echo("laps-sd: stopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (OtherSettings, Damaged, ModelError, OSError) as error:
        typer.echo(f"laps-sd: {error}", err=True)
        raise typer.Exit(1) from None
    pool_of = {"files": [file.name for file in workload or []], "kinds": dict(prompts.counted(pool))}
    outputs = {"json_file": json_file, "html_file": html_file, "recordings": recordings}
    counted = tell(folder, settings, pool_of, tolerant=work.tolerant, **outputs)
    if left:
        hours = left * work.pace_s / 3600
        about = f", about {hours:.1f} hours" if hours else ""
        typer.echo(f"laps-sd: {left} of {len(asked)} runs are left{about}: the same command goes on", err=True)
    elif not counted:
        typer.echo("laps-sd: all runs are left out, so nothing is compared", err=True)
    cut_short = left and minutes is None  # within `--minutes` some are left as a rule
    if cut_short or not (left or counted):
        raise typer.Exit(1)


def tell(
    folder: "Folder",
    settings: "Settings",
    about: dict[str, Any],
    *,
    tolerant: bool,
    json_file: Path | None,
    html_file: Path | None,
    recordings: Path | None,
) -> bool:
    """Prints and writes the figures of all runs in the folder, not only of those asked for. `about`: its prompts.
    Returns whether any run counts."""
    from laps_sd import machine
    from laps_sd.compare import identity
    from laps_sd.compare.design import BASE, Run
    from laps_sd.compare.folder import runs_of, settings_of
    from laps_sd.compare.replay import write_recordings
    from laps_sd.compare.show import shown  # they load numpy
    from laps_sd.compare.summary import summarise

    found = []
    for made in runs_of(folder.path):
        if made.get("policy_code", "") == identity.policy_code(made["run"]["policy"]):
            found.append(made)
        else:
            name = Run.of_json(made["run"]).name
            typer.echo(f"laps-sd: {name} is left out: its policy's code has changed since", err=True)
    if not found:
        typer.echo("laps-sd: there is no run yet", err=True)
        return False
    summary = summarise(found, settings.draft_len, faulty=tolerant)
    terminal.console().print(shown(summary), highlight=False)
    machines = [json.loads(text) for text in dict.fromkeys(json.dumps(run["machine"]) for run in found)]
    summary |= {
        "command": shlex.join(["laps-sd", *map(_without_place, sys.argv[1:])]),
        "prompts": about,
        "settings": settings_of(folder.path),
        "machine": machines[0],
        "machines": machines,
        "versions": found[0]["versions"],
        "capacity": {
            Run.of_json(run["run"]).name: run["results"]["request_throughput"]
            for run in found
            if Run.of_json(run["run"]) == Run.of_json(run["run"]).capacity
        },
        "took_s": sum(run["took_s"] for run in found),
        "latest_s": max((run["latest_s"] for run in found if tolerant or not run["faults"]), default=None)
        if settings.pace
        else None,
    }
    compared = [cell for cell in summary["cells"] if len(cell["policies"]) > 1] or summary["cells"]
    if len(compared) == 1:  # beside it there may be the run of the capacity
        summary["policies"] = {name: row["results"] for name, row in compared[0]["policies"].items()}
    if json_file:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    if html_file:
        from laps_sd.compare.page import html  # it loads matplotlib

        policies = dict.fromkeys(name for cell in summary["cells"] for name in cell["policies"])
        about = {"model": settings.model, "policies": ", ".join(policies)}
        of_runs = {"machine": "; ".join(f"{each['processor']}, {each['cores']} cores" for each in machines)}
        html_file.write_text(html(summary, about | machine.facts() | of_runs), encoding="utf-8")
    if recordings:
        left_out = {each["run"] for each in summary["left_out"]}
        base = [run for run in found if run["run"]["policy"] == BASE]
        write_recordings(
            recordings, (run for run in base if Run.of_json(run["run"]).name not in left_out), settings.draft_len
        )
    return bool(summary["cells"])


def _without_place(word: str) -> str:
    """A path without its folders, which say nothing on another machine."""
    return Path(word).name if word.startswith(("/", "..", "~")) else word


def _canonical(text: str) -> str:
    """A policy's own name, never `default`, and its settings. Raises ValueError."""
    from scheduler_service.core.policies import make_policy, policy_name
    from scheduler_service.sim.oracle import parts

    name, settings = parts(text.strip())
    return ":".join([policy_name(make_policy(name, settings)), *settings])


def _extra(text: str) -> "tuple[str, Cell]":
    """`sjf@2:0.85`. Raises ValueError."""
    from laps_sd.compare.design import Cell, check_load

    name, _, place = text.partition("@")
    slots, _, load = place.partition(":")
    if not (name and slots.isdecimal() and int(slots)):
        raise ValueError(f"{text!r} is not a policy at slots and a load, such as sjf@2:0.85")
    return _canonical(name), Cell(int(slots), check_load(load))


def _numbers(text: str, flag: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 2,4", param_hint=flag)
    return numbers
