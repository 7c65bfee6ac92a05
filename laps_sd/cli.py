"""The `laps-sd` command: registers each command's function. What a command does lives in that command's module."""

import typer

from laps_sd.certs import certs
from laps_sd.compare.command import compare
from laps_sd.demo import demo
from laps_sd.gatewaybench.command import gateway
from laps_sd.generate import generate, resume
from laps_sd.key import key
from laps_sd.loadtest.command import loadtest
from laps_sd.schedbench.command import scheduler
from laps_sd.simulate import simulate
from laps_sd.top import top
from laps_sd.up import up
from laps_sd.worker_commands import ALL_FLAGS, distill, engine, pull

app = typer.Typer(name="laps-sd", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure a part of LAPS-SD beside its peers.")


@app.callback()
def laps_sd() -> None:
    """LLM serving with speculative decoding, ordered by LAPS-SD for the lowest mean latency."""


for command in (generate, resume, pull, up, demo, simulate, loadtest, compare, top, certs):
    app.command()(command)
app.add_typer(key, name="key")
app.command(**ALL_FLAGS)(distill)
app.add_typer(bench, name="bench")
bench.command()(scheduler)
bench.command()(gateway)
bench.command(**ALL_FLAGS)(engine)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
