"""Rounds are charged to the flows and classes of the requests that ran. The accounts are kept by fairness.py and
classes.py."""

from collections.abc import Iterable

from scheduler_service.core.classes import ClassAccount, Classes
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import Round
from scheduler_service.core.fairness import Flow


def charge(classes: Classes, ran: Iterable[tuple[Entry, Round]], share_s: float, prefill_token_s: float) -> None:
    """`share_s`, `prefill_token_s`: nominal seconds of all workers that a slot's round takes, and a token of a prompt,
    for which a whole worker stands still."""
    served: dict[tuple[ClassAccount, Flow], tuple[int, int]] = {}
    for entry, row in ran:
        whose = entry.of_class, entry.flow
        rounds, prefilled = served.get(whose, (0, 0))
        served[whose] = rounds + ((len(row.each) or 1) if row.new else 0), prefilled + row.prefilled
    for (of_class, flow), (rounds, prefilled) in served.items():
        charge_one(classes, of_class, flow, rounds * share_s + prefilled * prefill_token_s)


def charge_one(classes: Classes, of_class: ClassAccount, flow: Flow, service_s: float) -> None:
    """Seconds of all workers, for requests of one flow."""
    flow.charge(service_s)
    classes.charge(of_class.klass, service_s)
