"""Flags of a command made from the fields of a dataclass, each of which may come from the environment (LAPS_SD_NAME)
or from a TOML file as well. Which fields there are is not known here.

What counts more comes first: the command line, the environment, the file, the default.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from laps_sd.config_file import CONFIG, settings_of
from protos.misspelt import refuse_misspelt

_OTHER_VARIABLES = ("config", "cache", "kernels", "join", "server", "api_key", "ca")  # LAPS_SD_NAME, of no flag here


@dataclass(frozen=True, slots=True)
class Flag:
    """`service`: whose section of the file the setting may stand in, and under whose heading `--help` lists it.
    `parser`: makes the value of a text, or raises ValueError; else the type does."""

    help: str
    service: str | None = None
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None

    def parse(self, value: object) -> Any:
        """`value`: a text, or the default, which may be what a text becomes."""
        return self.parser(str(value)) if self.parser else value

    @property
    def panel(self) -> str:
        return f"{self.service.capitalize()}s" if self.service else "Options"


def flags_of(kind: type) -> dict[str, Flag]:
    """By the name of the field."""
    hints = get_type_hints(kind, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: each for name, found in metadata.items() for each in found if isinstance(each, Flag)}


def takes_flags_of(
    kind: type, only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command `(context, *, FLAGS OF ITS OWN, **values)`: it takes the flags of the dataclass, and --config.

    `only`: the fields whose flags it takes; what the file says of others is not for it. None: all of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)
        defaults = {each.name: each.default for each in fields(kind)}
        annotations: dict[str, Any] = {"context": typer.Context}
        parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        for name, own in inspect.signature(command).parameters.items():
            if own.kind is inspect.Parameter.KEYWORD_ONLY:
                annotations[name] = get_type_hints(command, include_extras=True)[name]
                parameters.append(own.replace(annotation=annotations[name]))
        for name, flag in flags_of(kind).items():
            if only is not None and name not in only:
                continue
            annotations[name] = Annotated[_told(hints[name]), _option(name, flag, _bounds(hints[name]))]
            default = defaults[name]
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=list(default) if isinstance(default, tuple) else default,
                    annotation=annotations[name],
                )
            )
        annotations["config"] = Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                envvar="LAPS_SD_CONFIG",
                is_eager=True,
                callback=lambda context, file: _read(context, file, kind, only),
                help=f"TOML with the same settings; default: ./{CONFIG} if there is one. Flags, and variables "
                "LAPS_SD_NAME such as LAPS_SD_SLOTS, count more.",
            ),
        ]
        parameters.append(
            inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotations["config"])
        )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = annotations
        return command

    return decorate


def _option(name: str, flag: Flag, bounds: tuple[int | None, int | None]) -> Any:
    variables = [f"LAPS_SD_{name.upper()}"]
    if flag.service:
        variables.append(f"LAPS_SD_{flag.service.upper()}_{name.upper()}")
    return typer.Option(
        help=flag.help,
        metavar=flag.metavar,
        min=bounds[0],
        max=bounds[1],
        parser=flag.parse if flag.parser else None,
        envvar=variables,
        show_envvar=False,
        rich_help_panel=flag.panel,
    )


def _told(hint: Any) -> Any:
    """The type without what Annotated adds, a tuple as the list that Typer knows."""
    if get_origin(hint) is Annotated:
        return _told(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return list[str]
    arguments = get_args(hint)
    if type(None) in arguments:
        return _told(arguments[0]) | None
    return hint


def _bounds(hint: Any) -> tuple[int | None, int | None]:
    """The least and the most, as annotated_types gives them anywhere in the type."""
    least = most = None
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        least = getattr(part, "ge", least)
        most = getattr(part, "le", most)
        if get_args(part):
            inner = _bounds(part)
            least, most = inner[0] if least is None else least, inner[1] if most is None else most
    return least, most


def _read(context: typer.Context, file: Path | None, kind: type, only: Collection[str] | None) -> Path | None:
    """Puts the file's settings under those of flags and environment; further ones of services go to `context.obj`."""
    services = {f"{flag.service.upper()}_" for flag in flags_of(kind).values() if flag.service}  # each looks at its own
    try:
        refuse_misspelt("LAPS_SD_", [*flags_of(kind), *_OTHER_VARIABLES], ("TLS_", *services))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="environment") from None
    if file is None and CONFIG.is_file():
        file = CONFIG
    if file is not None:
        try:
            sections = {name: flag.service for name, flag in flags_of(kind).items()}
            told, context.obj = settings_of(file, sections)
            for each in fields(kind):
                if each.name in told and isinstance(told[each.name], list) is not isinstance(each.default, tuple):
                    if not isinstance(each.default, tuple):
                        raise ValueError(f"{file}: {each.name} is one value, no list")
                    told[each.name] = [told[each.name]]
            context.default_map = {name: value for name, value in told.items() if only is None or name in only}
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--config") from None
    return file
