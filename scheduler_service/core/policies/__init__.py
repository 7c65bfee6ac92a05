"""The order of requests, one policy a file. A policy is a pure function from a view to a claim: lower goes first."""

import dataclasses
from collections.abc import Iterable
from pkgutil import resolve_name

from scheduler_service.core.policies.base import Claim, Policy
from scheduler_service.core.policies.fcfs import Fcfs
from scheduler_service.core.policies.gittins import Gittins
from scheduler_service.core.policies.gsa import Gsa
from scheduler_service.core.policies.laps_sd import LapsSd
from scheduler_service.core.policies.las import Las
from scheduler_service.core.policies.mlfq import Mlfq
from scheduler_service.core.policies.sjf import Sjf
from scheduler_service.core.policies.srpt_length import SrptLength

POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "srpt-length": SrptLength,
    "las": Las,
    "mlfq": Mlfq,
    "laps-sd": LapsSd,
    "gsa": Gsa,
    "gittins": Gittins,
    "default": Gittins,
}

__all__ = [
    "POLICIES",
    "Claim",
    "Fcfs",
    "Gittins",
    "Gsa",
    "LapsSd",
    "Las",
    "Mlfq",
    "Policy",
    "Sjf",
    "SrptLength",
    "find_policy",
    "make_policy",
    "policy_name",
]


def policy_name(policy: Policy) -> str:
    """Its own name; never `default`. Of a class from elsewhere: its dotted path."""
    kind = type(policy)
    return next((name for name, known in POLICIES.items() if kind is known), f"{kind.__module__}.{kind.__qualname__}")


def find_policy(name: str) -> type[Policy]:
    """The policy of that name, or the class at a dotted path (`module.Class`), which is imported. Raises ValueError."""
    if name in POLICIES:
        return POLICIES[name]
    bare, _, setting = name.partition(":")
    if setting and bare in POLICIES:  # as simulations take it
        raise ValueError(f"policy: {name!r} has a setting in it: give the policy {bare}, and policy-set {setting}")
    if "." not in name:
        raise ValueError(f"policy: unknown policy {name!r}; known: {', '.join(POLICIES)}, or MODULE.CLASS of your own")
    try:
        kind = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy: {name!r} cannot be imported: {error}; is its folder in PYTHONPATH?") from error
    except Exception as error:  # of its own code
        raise ValueError(f"policy: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Policy) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"policy: {name!r} is no dataclass derived from scheduler_service.core.policies.Policy")
    for field in dataclasses.fields(kind):
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"policy: {name!r}: its setting {field.name} needs a default")
    return kind


def make_policy(name: str, settings: Iterable[str] = ()) -> Policy:
    """The policy of that name with `name=value` settings. Raises ValueError that says what is wrong."""
    kind = find_policy(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in fields:
            known = ", ".join(fields) or "none"
            raise ValueError(f"policy-set: {setting!r} is not name=value with a setting of {name}; known: {known}")
        values[key] = _parse(setting, text.strip(), fields[key].default)
    try:
        return kind(**values)
    except Exception as error:  # of a policy's own checks
        if isinstance(error, ValueError) and kind in POLICIES.values():
            raise
        raise ValueError(f"policy: {name!r} cannot be made: {type(error).__name__}: {error}") from error


def _parse(setting: str, text: str, default: object) -> object:
    """`text` as a value of the default's type."""
    if not isinstance(default, bool | int | float | str):
        raise ValueError(f"policy-set: {setting!r}: this setting is no number, text or bool, and cannot be set so")
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        raise ValueError(f"policy-set: {setting!r} is no {type(default).__name__}") from None
