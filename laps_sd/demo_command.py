"""`laps-sd demo`: its flags. What it runs is in demo.py, what it shows in demo_view.py."""

from pathlib import Path
from typing import Annotated

import typer

from laps_sd.options import Device
from protos.bounds import Dtype
from worker_service.outputs import writable


def demo(
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    policy: Annotated[
        str, typer.Option(help="The order of requests, as of `laps-sd up`; it is compared with fcfs.")
    ] = "default",
    device: Annotated[Device, typer.Option()] = "auto",
    dtype: Annotated[Dtype, typer.Option()] = "auto",
    picture: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", callback=writable, help="Write what it told as a picture."),
    ] = None,
) -> None:
    """Stream twelve prompts at once, first come, first served and under our policy; compare; take all down again.

    Two workers of two slots. Each policy has two runs, fcfs the first and the last, for the machine's speed may change;
    one run each where the machine is slow.
    """
    from laps_sd.demo import run_demo

    run_demo(model, policy, device, dtype, picture)
