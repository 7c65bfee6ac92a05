"""Commands that a program of the worker carries out, because they need the model. Nothing is decided here."""

import subprocess
import sys
from typing import Annotated, Any

import typer

# The flags, --help too, are those of the worker's program.
ALL_FLAGS: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def pull(
    model: Annotated[str, typer.Argument(help="A name (smollm2-135m), a Hugging Face directory or a .gguf file.")],
) -> None:
    """Fetch and convert MODEL into the local cache (moved with LAPS_SD_CACHE); prints its directory."""
    _run("worker_service.pull", model)


def distill(context: typer.Context) -> None:
    """Make a draft head for a target model from prompts: generate, train, evaluate. Interrupt and repeat it freely.

    Needs --target M --prompts FILE... --out DIR; `laps-sd distill --help` lists the rest.
    """
    _run("worker_service.distill", *context.args)


def engine(context: typer.Context) -> None:
    """The engine, with and without speculation, beside transformers and other engines, on the same prompts in one run.

    `laps-sd bench engine --help` lists its flags.
    """
    _run("worker_service.bench", *context.args)


def _run(module: str, *arguments: str) -> None:
    """Ends this command with the program's exit code."""
    process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments])
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # the program got the signal as well, and ends in good order
