"""Rounds are charged to the tenants and classes of the requests that ran. The accounts are kept by fairness.py and
classes.py."""

from collections.abc import Iterable

from scheduler_service.core.classes import ClassAccount, Classes
from scheduler_service.core.entry import Entry
from scheduler_service.core.fairness import Tenant
from scheduler_service.core.types import Round


def charge(classes: Classes, ran: Iterable[tuple[Entry, Round]], share_s: float, prefill_token_s: float) -> None:
    """`share_s`: nominal seconds of a whole worker that a slot's round is; a prompt takes the whole worker."""
    served: dict[tuple[ClassAccount, Tenant], tuple[int, int]] = {}
    for entry, row in ran:
        whose = entry.of_class, entry.tenant
        rounds, prefilled = served.get(whose, (0, 0))
        served[whose] = rounds + ((len(row.each) or 1) if row.new else 0), prefilled + row.prefilled
    for (of_class, tenant), (rounds, prefilled) in served.items():
        charge_one(classes, of_class, tenant, rounds * share_s + prefilled * prefill_token_s)


def charge_one(classes: Classes, of_class: ClassAccount, tenant: Tenant, service_s: float) -> None:
    """Seconds of a whole worker, for requests of one class and tenant."""
    tenant.charge(service_s)
    classes.charge(of_class.klass, service_s)
