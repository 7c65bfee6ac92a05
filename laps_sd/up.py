"""`laps-sd up`: its flags are in options.py, what is wrong with them is said by checks.py and service_checks.py, and
serve.py runs the stack."""

from typing import TYPE_CHECKING, Any

import typer

from laps_sd.flags import takes_flags_of
from laps_sd.options import Options

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from laps_sd.stack import Stack


@takes_flags_of(Options)
def up(context: typer.Context, **told: Any) -> None:
    """Run the whole stack on this machine until SIGTERM or Ctrl-C; logs on stderr, as JSON lines.

    Prints `ready grpc=HOST:PORT http=HOST:PORT` when a warmed worker serves. Children that die are started again.
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
    from laps_sd.serve import run_stack

    run_stack(options, _serve)


async def _serve(stack: "Stack") -> None:
    import asyncio

    await stack.ready()
    typer.echo(f"ready grpc={stack.grpc} http={stack.http}")
    await asyncio.Event().wait()  # until cancelled by a signal
