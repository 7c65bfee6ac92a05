"""The value of `--draft-len`, for every command. With `auto` the scheduler chooses; how is not known here."""

import typer

MOST = 64


def parse_draft_len(text: str, most: int = MOST) -> int | None:
    """The number of draft tokens, or None for `auto`. Raises typer.BadParameter."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) > most:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number from 0 to {most}", param_hint="--draft-len")
    return int(text)
