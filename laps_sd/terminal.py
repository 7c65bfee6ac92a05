"""How commands show their results: tables on the terminal, HTML reports. No table and no report lives here."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

PIPE_WIDTH = 140  # characters, where there is no terminal to ask


def console() -> Console:
    """Standard output, as wide as its terminal. A pipe gets whole tables, not ones cut to eighty characters."""
    asked = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if asked else Console(width=PIPE_WIDTH)


@contextmanager
def importing_report() -> Iterator[None]:
    """Around the import of what draws an HTML report. Commands import it before they run anything: without matplotlib,
    of the extra `lab`, they end here. Raises typer.BadParameter."""
    try:
        yield
    except ImportError:
        raise typer.BadParameter("needs the extra: pip install 'laps-sd[lab]'", param_hint="--html") from None
