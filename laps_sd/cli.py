"""The commands of `laps-sd`: under which name each is called, and where it lives. What a command does lives there."""

from typing import Annotated

import typer

from laps_sd.lazy import Program, add_commands

# By name: MODULE:FUNCTION, which is imported when the command is called, and what lists of commands say of it.
COMMANDS = {
    "generate": ("laps_sd.generate:generate", "Stream the answer to PROMPT from a running server."),
    "resume": ("laps_sd.generate:resume", "Stream the answer of an earlier request."),
    "pull": ("laps_sd.worker_commands:pull", "Fetch MODEL into the local cache, converted if need be."),
    "up": ("laps_sd.up:up", "Run the whole stack on this machine until SIGTERM or Ctrl-C."),
    "scale": ("laps_sd.scale_command:scale", "More workers for the `laps-sd up` of this machine, or fewer."),
    "worker": ("laps_sd.join:worker", "Run a worker that joins a running service."),
    "drain": ("laps_sd.scale_command:drain", "Have a worker of a running service end in good order."),
    "demo": (
        "laps_sd.demo_command:demo",
        "Stream twelve prompts at once, first come, first served and under our policy; compare.",
    ),
    "simulate": ("laps_sd.simulate:simulate", "Compare policies on a workload, under a virtual clock."),
    "loadtest": ("laps_sd.loadtest.command:loadtest", "Put a server under load and measure it."),
    "compare": ("laps_sd.compare.command:compare", "Run the live stack under one policy after the other."),
    "top": ("laps_sd.top_command:top", "Watch a running service: its queues, requests, workers, rates."),
    "certs": ("laps_sd.certs:certs", "Make a private CA, certificates for mutual TLS and a user of Redis."),
    "distill": ("worker_service.distill.command:app", "Make a draft head for a target model from prompts."),
}
KEY_COMMANDS = {
    "new": ("laps_sd.key:new", "Make a key for TENANT."),
    "list": ("laps_sd.key:list_keys", "List the keys of a file: ids, tenants, rights."),
    "revoke": ("laps_sd.key:revoke", "Take a key out of a file: the gateway refuses it from then on."),
}
BENCH_COMMANDS = {
    "scheduler": ("laps_sd.schedbench.command:scheduler", "The scheduler and its Redis alone."),
    "gateway": ("laps_sd.gatewaybench.command:gateway", "What the gateway adds over HTTP, without a model."),
    "engine": (
        "worker_service.bench.command:app",
        "The engine, with and without speculation, beside transformers.",
    ),
}

app = typer.Typer(name="laps-sd", cls=Program, no_args_is_help=True, pretty_exceptions_enable=False)
key = typer.Typer(no_args_is_help=True, help="API keys of tenants.")
bench = typer.Typer(no_args_is_help=True, help="Measure a part of LAPS-SD beside its peers.")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"laps-sd {version('laps-sd')}")
        raise typer.Exit


@app.callback()
def laps_sd(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """LLM serving with speculative decoding, ordered for the lowest mean latency."""


add_commands(app, COMMANDS)
add_commands(key, KEY_COMMANDS)
add_commands(bench, BENCH_COMMANDS)
app.add_typer(key, name="key")
app.add_typer(bench, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
