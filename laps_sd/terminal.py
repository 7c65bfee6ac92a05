"""Where commands print their tables. No table lives here."""

import os
import sys

from rich.console import Console

PIPE_WIDTH = 140  # characters, where there is no terminal to ask


def console() -> Console:
    """Standard output, as wide as its terminal. A pipe gets whole tables, not ones cut to eighty characters."""
    asked = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if asked else Console(width=PIPE_WIDTH)
