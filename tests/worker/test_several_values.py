"""Options that take several values at once, as `laps-sd distill --prompts A B --test C` does."""

from typing import Annotated

import pytest
import typer

from worker_service.several_values import SeveralValues


@pytest.mark.parametrize(
    "words",
    ["--many a b --one c", "--one c --many a b", "--many a --one c --many b", "--many=a --many b --one c"],
)
def test_values_of_an_option_may_follow_each_other(words: str) -> None:
    told: list[object] = []
    app = typer.Typer()

    @app.command(cls=SeveralValues)
    def take(many: Annotated[list[str], typer.Option()], one: Annotated[str, typer.Option()]) -> None:
        told.extend([many, one])

    app(words.split(), standalone_mode=False)
    assert told == [["a", "b"], "c"]
