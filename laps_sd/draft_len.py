"""The value of `--draft-len`, the same for every command. What is chosen for auto is the scheduler's."""

import typer

MOST = 64


def parse_draft_len(text: str, most: int = MOST) -> int | None:
    """None for auto. Raises typer.BadParameter."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) > most:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number from 0 to {most}", param_hint="--draft-len")
    return int(text)
