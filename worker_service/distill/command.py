"""`laps-sd distill`: its flags. What it does is in work.py, which loads torch."""

from argparse import Namespace
from pathlib import Path
from typing import Annotated, Literal

import typer

from worker_service.several_values import SeveralValues

app = typer.Typer(add_completion=False)


@app.command("distill", cls=SeveralValues)
def distill(
    target: Annotated[str, typer.Option(metavar="MODEL", help="As in `laps-sd pull`.")],
    prompts: Annotated[list[Path], typer.Option(metavar="FILE...", help="JSON Lines (.gz) with `prompt`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the drafter goes.")],
    kind: Annotated[
        Literal["recurrent", "eagle3"], typer.Option(help="A small head without attention, or one in EAGLE-3's format.")
    ] = "recurrent",
    test: Annotated[
        list[Path] | None, typer.Option(metavar="FILE...", help="Prompts to judge by, never learned from.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Samples and checkpoints. Default: OUT.work.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the target's own output.")] = 1_000_000,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of each third prompt; the others are answered greedily.")
    ] = 0.7,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Size of the draft vocabulary.")] = 4096,
    passes: Annotated[int, typer.Option(min=1, help="Over all of the output.")] = 8,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Of a training step.")] = 768,
    learning_rate: Annotated[float, typer.Option(min=0)] = 2e-3,
    unroll: Annotated[int, typer.Option(min=1, help="Steps of a chain that are trained.")] = 2,
    test_tokens: Annotated[int, typer.Option(min=1, help="Of output on --test prompts.")] = 20_000,
    race: Annotated[int, typer.Option(min=1, help="Answers by which the speed is measured.")] = 24,
    race_draft_len: Annotated[int, typer.Option(min=0)] = 6,
    probe: Annotated[bool, typer.Option(help="Make a probe of remaining length instead of a drafter.")] = False,
    judge: Annotated[
        str, typer.Option(metavar="DIR|default", help="Make none: read answers to the prompts by this probe.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
) -> None:
    """Make a draft head for a target model from prompts: generate, train, evaluate. Interrupt and repeat it freely."""
    told = Namespace(**locals())
    told.test, told.work = test or [], work or out.with_name(out.name + ".work")
    from worker_service.distill.work import run

    run(told)
