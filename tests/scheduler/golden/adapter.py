"""All names of the core that the golden scenarios use. When the core renames something, only this file follows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from scheduler_service.core import outlook, placement
from scheduler_service.core.core import Core
from scheduler_service.core.entry import Entry
from scheduler_service.core.policies import make_policy
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import Advanced, Bounds, Changed, Effect, Ended, Plan, Record, Unseen, WentOn

Line = tuple[object, ...]


def make_core(policy: str, draft_len: int | None, prefill_chunk: int, bounds: Bounds, max_deaths: int) -> Core:
    name, *settings = policy.split(":")
    return Core(
        make_policy(name, settings),
        draft_len=draft_len,
        prefill_chunk=prefill_chunk,
        bounds=bounds,
        max_deaths=max_deaths,
    )


def entries(core: Core) -> Mapping[str, Entry]:
    return core.fleet.entries


def workers(core: Core) -> Iterable[str]:
    return core.fleet.workers


def set_terms(core: Core, terms: Mapping[str, Terms]) -> None:
    core.fleet.tenants.terms = terms


def set_unseen(core: Core, unseen: Unseen) -> None:
    core.fleet.unseen = unseen


def records(core: Core) -> list[Record]:
    """What the store would have of all live requests."""
    return [entry.record() for entry in core.fleet.entries.values()]


def teach(old: Core, new: Core) -> None:
    """A new scheduler reads what the old one has learned."""
    new.fleet.known.length, new.fleet.known.acceptance = old.fleet.known.length, old.fleet.known.acceptance


def worker_to_plan_for(core: Core, id: str) -> str | None:
    return placement.called_for(core.fleet, id)


def idle_worker(core: Core) -> str | None:
    return placement.idle_beside_work(core.fleet)


def standing(core: Core, ids: Sequence[str]) -> Line:
    """What people may ask about requests."""
    return (
        [round(wait_s, 9) for wait_s in outlook.waits_s(core.fleet, ids)],
        [outlook.position(core.fleet, id) for id in ids],
        [core.fleet.entries[id].predicted_tokens for id in ids],
        [round(outlook.remaining_s(core.fleet, id), 9) for id in ids],
        list(islice(chain.from_iterable(outlook.in_order(core.fleet, 8)), 8)),
    )


def schedule(plan: Plan) -> list[tuple[str, int, int, int]]:
    """Best first: id, placement, draft length, tokens of prompt."""
    return [(run.id, run.placement, run.draft_len, run.prefill_tokens) for run in plan.schedule]


def plan_line(plan: Plan) -> Line:
    return (schedule(plan), plan.drop, plan.offload, plan.to_forget)


def effect_lines(core: Core, effects: Iterable[Effect], starts: Mapping[str, int]) -> Iterator[Line]:
    """By request, since no order among requests is promised. `starts`: of the rows in the event."""
    went_on = [id for effect in effects if isinstance(effect, WentOn) for id in effect.ids]
    advanced = [_advanced(core.fleet.entries[id].record(), starts[id]) for id in went_on]
    others = [_effect_line(effect) for effect in effects if not isinstance(effect, WentOn)]
    return iter(sorted([*advanced, *others]))


def _advanced(record: Record, start: int) -> Line:
    return (record.request.id, "Advanced", start, *_fields(record))


def _effect_line(effect: Changed | Advanced | Ended) -> Line:
    record = effect.record
    if isinstance(effect, Advanced):
        return _advanced(record, effect.start)
    if isinstance(effect, Ended):
        finish = effect.finish.name if effect.finish else ""
        start = -1 if effect.start is None else effect.start
        return (record.request.id, "Ended", start, finish, effect.cut, *_claim(record), *_fields(record))
    return (record.request.id, "Changed", 0, *_claim(record), *_fields(record))


def _claim(record: Record) -> Line:
    return (record.level, f"{record.key:.9g}")


def _fields(record: Record) -> Line:
    seen = record.acceptance
    return (
        record.state.name,
        record.placement,
        record.emitted,
        record.prefilled,
        (seen.rounds, seen.drafted, seen.accepted, seen.rejected),
        record.perceptible,
        record.preemptions,
        None if record.started is None else round(record.started, 9),
        record.deaths,
        record.probation,
    )


def ended(effects: Iterable[Effect]) -> Iterator[tuple[str, str]]:
    """Who ended, and how."""
    for effect in effects:
        if isinstance(effect, Ended):
            yield effect.record.request.id, effect.record.state.name
