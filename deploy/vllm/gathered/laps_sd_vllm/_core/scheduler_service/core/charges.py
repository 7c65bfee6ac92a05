"""Rounds are charged to the tenants and classes of the requests that ran. The accounts are kept by fairness.py and
classes.py."""

from collections.abc import Iterable

from laps_sd_vllm._core.scheduler_service.core.classes import ClassAccount, Classes
from laps_sd_vllm._core.scheduler_service.core.entry import Entry
from laps_sd_vllm._core.scheduler_service.core.fairness import Tenant
from laps_sd_vllm._core.scheduler_service.core.types import Round


def charge(classes: Classes, ran: Iterable[tuple[Entry, Round]], share_s: float, prefill_token_s: float) -> None:
    """`share_s`: nominal seconds of a whole worker that a slot's round is; a prompt takes the whole worker."""
    service_s: dict[tuple[ClassAccount, Tenant], float] = {}
    for entry, row in ran:
        decoding_s = share_s * (len(row.each) or 1) if row.new else 0.0
        whose = entry.of_class, entry.tenant
        service_s[whose] = service_s.get(whose, 0.0) + (decoding_s + row.prefilled * prefill_token_s)
    for (of_class, tenant), seconds in service_s.items():
        tenant.charge(seconds)
        classes.charge(of_class.klass, seconds)
