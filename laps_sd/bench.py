"""`laps-sd bench`: its commands. Nothing is measured here."""

import subprocess
import sys

import typer

from laps_sd.schedbench.command import scheduler

app = typer.Typer(no_args_is_help=True, help="Measure a part of LAPS-SD beside its peers.")


app.command()(scheduler)


# Its flags, --help too, are those of the worker's module.
@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def engine(context: typer.Context) -> None:
    """The engine, with and without speculation, beside transformers and other engines, on the same prompts in one run.

    `laps-sd bench engine --help` lists its flags.
    """
    command = [sys.executable, "-P", "-m", "worker_service.bench", *context.args]
    process = subprocess.Popen(command)
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # it got the signal too, and ends its peers
