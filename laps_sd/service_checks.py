"""What each service would say of its settings: they are read here as it will read them, from the command line and the
environment that it will get. So no bound is declared twice, and no process is started for nothing."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from gateway.config import Settings as Gateway
from laps_sd.checks import Wrong, flag
from laps_sd.flags import flags_of
from laps_sd.options import Options
from laps_sd.stack import drafter_command, gateway_command, scheduler_command, worker_command, worker_named
from laps_sd.supervise import Command
from protos.settings import ServiceSettings, refuse_misspelt_variables, unreadable
from scheduler_service.config import Settings as Scheduler
from worker_service.config import Settings as Worker
from worker_service.drafting.config import Settings as Drafter
from worker_service.vllm_engine.config import Settings as VllmWorker

# Names of services' settings that follow from an option of another name.
_OPTION_OF = {"max_draft": "draft_len", "redis_url": "redis", "tls": "certs", "policy-set": "policy_set"}
_NOWHERE = "127.0.0.1:1"  # in place of a scheduler, which nobody looks for yet


def check_services(options: Options) -> None:
    """Raises Wrong with the first thing that a service would refuse."""
    one = replace(options, devices=1, stages=1)  # else the command is torchrun's
    _check(options, "scheduler", Scheduler, scheduler_command(one, 1, one.redis or "unix:///redis.sock"))
    _check(options, "worker", _worker(one), worker_command(one, 0, _NOWHERE, Path("model")))
    if one.drafters:
        _check(options, "drafter", Drafter, drafter_command(one, 0, 1, Path("model")))
    _check(options, "gateway", Gateway, gateway_command(one, one.grpc_port, one.http_port, _NOWHERE))


def check_joining(options: Options) -> None:
    """The same for a worker alone."""
    command = worker_named("worker", replace(options, devices=1, stages=1), _NOWHERE, Path("model"), 1, joins=True)
    _check(options, "worker", _worker(options), command)


def _worker(options: Options) -> type[ServiceSettings]:
    return VllmWorker if options.engine == "vllm" else Worker


def _check(options: Options, service: str, settings: type[ServiceSettings], command: Command) -> None:
    module, flags = command.arguments[3], command.arguments[4:]  # after python -P -m
    for name in options.services.get(service, {}):
        if name not in settings.model_fields:
            raise Wrong(f"[{service}] {name}", f"no such setting; `python -m {module} --help` lists them")
        if _sets(flags, name):
            raise Wrong(f"[{service}] {name}", "`laps-sd up` sets this itself")
    with _environment(command.environment):
        try:
            refuse_misspelt_variables(settings)
            _refuse_short_names(settings, command)
        except ValueError as error:
            raise Wrong("environment", str(error)) from None
        try:
            read = CliApp.run(settings, cli_args=list(flags))
        except ValidationError as error:
            raise _told(service, error) from None
        except SettingsError as error:
            raise Wrong(f"[{service}]", unreadable(error)) from None
    if problem := read.tls.expired():
        raise Wrong("--certs", problem)


def _refuse_short_names(settings: type[ServiceSettings], command: Command) -> None:
    """A setting that only services have is read by them under a longer name, and `up` has no flag for it. Raises
    ValueError where a variable has the short name."""
    for name in settings.model_fields.keys() - flags_of(Options).keys():
        variable = f"LAPS_SD_{name.upper()}"
        if not os.environ.get(variable) or os.environ[variable].startswith("tcp:"):
            continue  # Kubernetes makes LAPS_SD_PORT of a Service of our name
        if _sets(command.arguments, name):
            raise ValueError(f"{variable} is no setting of `laps-sd up`, which sets that itself")
        kinds = [each for each in (Scheduler, settings, Gateway) if name in each.model_fields]
        own = dict.fromkeys(f"{each.model_config['env_prefix']}{name.upper()}" for each in kinds)
        raise ValueError(f"{variable} is no setting of `laps-sd up`; did you mean {' or '.join(own)}?")


def _sets(flags: Sequence[str], name: str) -> bool:
    return any(word.partition(".")[0] == flag(name) for word in flags)


def _told(service: str, error: ValidationError) -> Wrong:
    """The first problem, under the name that somebody gave the setting."""
    first = error.errors(include_input=False)[0]  # an input may be a password
    words = first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0]) if first["loc"] else ""
    if not name:  # a setting that is checked together with others names itself
        name, _, words = words.partition(": ")
    option = _OPTION_OF.get(name, name)
    return Wrong(flag(option) if option in flags_of(Options) else f"[{service}] {name}", words)


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
