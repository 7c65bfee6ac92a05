"""Commands that a program of the worker carries out, because they need the model. Nothing is decided here."""

import subprocess
import sys
from typing import Annotated

import typer


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="smollm2-135m; OWNER/NAME or OWNER/NAME@REVISION of the Hugging Face hub, or OWNER/NAME:FILE.gguf; "
            "a Hugging Face directory; a .gguf file."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Some models, with size and licence.")] = False,
) -> None:
    """Fetch MODEL into the local cache, converted if need be; prints its directory. LAPS_SD_CACHE moves the cache.

    Models of the hub lie in the hub's own cache, unless LAPS_SD_CACHE is set. HF_TOKEN opens those that need it.
    """
    if (model is None) != listed:
        raise typer.BadParameter("name a model, or give --list", param_hint="MODEL")
    _run("worker_service.pull", "--list" if model is None else model)


def _run(module: str, *arguments: str) -> None:
    """Ends this command with the program's exit code."""
    process = subprocess.Popen([sys.executable, "-P", "-m", "laps_sd.interrupt", module, *arguments])
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # the program got the signal as well, and ends in good order
