"""The value of `--draft-len`, for every command. With `auto` the scheduler chooses; how is not known here."""

MOST = 64


def parse_draft_len(text: str, most: int = MOST) -> int | None:
    """The number of draft tokens, or None for `auto`. Raises ValueError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"{text!r} is neither auto nor a number from 0 to {most}")
    return int(text)
