"""The `laps-sd` command: registers each command's function. What a command does lives in that command's module."""

import typer

from laps_sd import bench
from laps_sd.certs import certs
from laps_sd.compare.command import compare
from laps_sd.demo import demo
from laps_sd.distill import distill
from laps_sd.generate import generate, resume
from laps_sd.key import key
from laps_sd.loadtest.command import loadtest
from laps_sd.simulate import simulate
from laps_sd.top import top
from laps_sd.up import pull, up

app = typer.Typer(name="laps-sd", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def laps_sd() -> None:
    """LLM serving with speculative decoding, ordered by LAPS-SD for the lowest mean latency."""


app.command()(generate)
app.command()(resume)
app.command()(pull)
app.command()(up)
app.command()(demo)
app.command()(simulate)
app.command()(loadtest)
app.command()(compare)
app.command()(top)
app.command()(certs)
app.add_typer(key, name="key")
# Its flags, --help too, are those of the worker's module.
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(distill)


app.add_typer(bench.app, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
