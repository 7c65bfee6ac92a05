"""Tables of settings: those of `laps-sd up`, those that every service has, and each service's further ones."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from deploy.reference.tables import code, default_of, table
from gateway.config import Settings as GatewaySettings
from laps_sd.flags import flags_of
from laps_sd.options import Options
from protos.settings import ServiceSettings
from scheduler_service.config import Settings as SchedulerSettings
from worker_service.config import Settings as WorkerSettings
from worker_service.drafting.config import Settings as DrafterSettings

SERVICES: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "drafter": DrafterSettings,
}


def up() -> str:
    """Flags of `laps-sd up`."""
    hints, defaults = (
        get_type_hints(Options, include_extras=True),
        {each.name: each.default for each in fields(Options)},
    )
    return table(
        ("flag", "default", "values", "section", "meaning"),
        (
            (
                code(_flag(name)),
                default_of(defaults[name]),
                flag.metavar or values(hints[name]),
                flag.service or "",
                flag.help,
            )
            for name, flag in flags_of(Options).items()
        ),
    )


def common() -> str:
    return _settings(ServiceSettings, without=flags_of(Options).keys())


def of_service(name: str) -> Callable[[], str]:
    """Settings of a service that neither `laps-sd up` nor the others have, or that have another default there."""

    def make() -> str:
        defaults = {each.name: each.default for each in fields(Options) if each.name in flags_of(Options)}
        known = SERVICES[name].model_fields
        same = {key for key, field in known.items() if defaults.get(key, ...) in (field.default, None)}
        return _settings(SERVICES[name], without=same | ServiceSettings.model_fields.keys())

    return make


def _settings(kind: type[BaseSettings], without: Iterable[str]) -> str:
    told = {name: field for name, field in kind.model_fields.items() if name not in without}
    for name in [name for name, field in told.items() if isinstance(field.annotation, type(BaseSettings))]:
        inner = told.pop(name).annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseSettings)
        told |= {f"{name}.{below}": field for below, field in inner.model_fields.items()}
    return table(
        ("flag", "default", "values", "meaning"),
        (
            (
                code(_flag(name)),
                _of_field(field),
                values(kind.__annotations__.get(name), field),
                field.description or "",
            )
            for name, field in told.items()
        ),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _of_field(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if field.default_factory else default_of(field.default)


def values(hint: Any, field: FieldInfo | None = None) -> str:
    """The values that a setting may have: a choice, or bounds."""
    choices = list(dict.fromkeys(_choices(field.annotation if field else hint)))
    bounds = dict(_bounds([hint, *(field.metadata if field else ())]))
    if {"ge", "le"} <= bounds.keys():
        return ", ".join([*choices, f"{bounds['ge']}–{bounds['le']}"])
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(choices + [f"{signs[name]}{bounds[name]}" for name in signs if name in bounds])


def _choices(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (code(str(each)) for each in get_args(hint))
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (code(str(each.value)) for each in hint)
    else:
        for part in get_args(hint):
            yield from _choices(part)


def _bounds(parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        for sign in ("ge", "gt", "le", "lt"):
            if (bound := getattr(part, sign, None)) is not None:
                yield sign, bound
        yield from _bounds((*getattr(part, "metadata", ()), *getattr(part, "__metadata__", ()), *get_args(part)))
