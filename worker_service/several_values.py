"""Options that take several values at once. No command lives here."""

from typing import Any

from typer.core import TyperCommand


class SeveralValues(TyperCommand):
    """`--prompts A B` is `--prompts A --prompts B`, for every option that may be repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        option, values = "", 0  # the repeatable option that we are in, and how many values it has had
        for word in args:
            if word.startswith("-"):
                option, values = word if word in repeatable else "", 0
            elif option:
                spread += [option] if values else []
                values += 1
            spread.append(word)
        parsed: list[str] = super().parse_args(ctx, spread)
        return parsed
