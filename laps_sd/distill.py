"""`laps-sd distill`: hands its flags to the worker's own module, which knows tensors. Nothing is decided here."""

import subprocess
import sys

import typer


def distill(context: typer.Context) -> None:
    """Make a draft head for a target model from prompts: generate, train, evaluate. Interrupt and repeat it freely.

    Needs --target M --prompts FILE... --out DIR; `laps-sd distill --help` lists the rest.
    """
    command = [sys.executable, "-P", "-m", "worker_service.distill", *context.args]
    process = subprocess.Popen(command)
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # it got the signal too, and says what it saved
