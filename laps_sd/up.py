"""`laps-sd up`: its flags are in options.py, what is wrong with them is said by checks.py and service_checks.py, and
serve.py runs the stack."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from laps_sd.flags import takes_flags_of
from laps_sd.options import Options

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from laps_sd.stack import Stack


@takes_flags_of(Options)
def up(context: typer.Context, **told: Any) -> None:
    """Run the whole stack on this machine until SIGTERM or Ctrl-C. Services that die are started again.

    On a terminal it shows how far the start is, and then what to type. Where its output is read by a program, the logs
    on stderr are JSON lines, and stdout says `ready grpc=HOST:PORT http=HOST:PORT scheduler=HOST:PORT` when a warmed
    worker serves. Further workers join at the last one (`laps-sd worker`); `laps-sd scale` changes how many there are.
    """
    from laps_sd.checks import Wrong, check_machine

    told.pop("config")
    options = Options(**told | {"policy_set": tuple(told["policy_set"] or ()), "services": context.obj or {}})
    try:
        check_machine(options)
        from laps_sd.service_checks import check_services  # it loads much

        check_services(options)
    except Wrong as wrong:
        param: Any = next((param for param in context.command.params if wrong.setting in param.opts), None)
        hint = None if param else wrong.setting
        raise typer.BadParameter(wrong.problem, ctx=context, param=param, param_hint=hint) from None
    from laps_sd import up_screen
    from laps_sd.serve import run_stack

    if not up_screen.is_wanted():
        run_stack(options, partial(_serve, _tell_programs))
        return
    from rich.console import Console

    with up_screen.Screen(Console(stderr=True), options) as screen:
        run_stack(options, partial(_serve, screen.ready), emit=screen.emit)


def _tell_programs(grpc: str, http: str, scheduler: str) -> None:
    typer.echo(f"ready grpc={grpc} http={http} scheduler={scheduler}")


async def _serve(tell: Callable[[str, str, str], None], stack: "Stack") -> None:
    import asyncio

    await stack.ready()
    tell(stack.grpc, stack.http, stack.scheduler)
    await asyncio.Event().wait()  # until cancelled by a signal
