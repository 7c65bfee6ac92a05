"""`laps-sd demo`: its flags. What it runs and shows is in demo.py."""

from typing import Annotated

import typer

from laps_sd.options import Device
from protos.bounds import Dtype


def demo(
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    policy: Annotated[str, typer.Option(help="The order of requests: laps-sd, fcfs, gittins, ...")] = "laps-sd",
    device: Annotated[Device, typer.Option()] = "auto",
    dtype: Annotated[Dtype, typer.Option()] = "auto",
) -> None:
    """Bring up two workers of two slots, stream twelve prompts at once, show what happened, take all down again."""
    from laps_sd.demo import run_demo

    run_demo(model, policy, device, dtype)
