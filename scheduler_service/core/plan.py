"""One worker's next plan: choose the requests, fit their KV, set draft lengths, list them. Observes nothing."""

from scheduler_service.core import kv, placement
from scheduler_service.core.draft import PROBE_ROUNDS, choose_draft_lengths
from scheduler_service.core.elsewhere import grant_chains
from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.types import Plan, Run


def make_plan(fleet: Fleet, name: str, *, choose_drafts: bool, prefill_chunk: int) -> Plan:
    """What the worker shall run from now on. Places waiting requests on it, some of another worker's among them.

    `choose_drafts`: as many drafts as pay, rather than always the same. `prefill_chunk`: tokens of a prompt in a round.
    """
    fleet.refit_some()
    worker = fleet.workers[name]
    placement.displace_outgrown(fleet, worker)  # before it is asked which worker is vacant
    suspects = placement.choose_suspects(fleet, name)
    chosen = placement.choose(fleet, name) if suspects is None else suspects
    by_claim_reversed = (fleet.entries[key[-1]] for key in reversed(worker.ranking))
    schedule, evict = kv.fit(
        worker, chosen, by_claim_reversed, quarantined=suspects is not None, foresight=fleet.foresight
    )
    left_out = () if schedule == chosen else set(chosen).difference(schedule)
    worker.left_out = tuple([entry.request.id for entry in left_out])
    for entry, copy in evict.items():
        worker.free_blocks += entry.blocks  # once this plan is carried out, which the next one may rely on
        entry.offload_kv(copy) if copy else entry.lose_kv()
        entry.next_placement()  # a row of the round in hand must not bring back what the plan gives away
        fleet.rank(entry)
    if worker.up.cost.chains or worker.drafted_elsewhere:
        for entry in grant_chains(worker, schedule, fleet.known, fleet.believed_rounds, fleet.tenants.terms_of):
            fleet.rank(entry)
    if choose_drafts:
        ready_first = fleet.ready_first and worker.up.cost.chains > 0  # then whoever is ready runs
        listed = schedule if ready_first else schedule[: worker.up.slots]
        choose_draft_lengths(listed, fleet.known.acceptance, worker.up.cost, worker.up.max_draft)
    longest = worker.up.max_draft
    some = worker.up.cost.chains > 0
    runs = tuple([_run(entry, longest, choose_drafts, prefill_chunk, some, fleet.ready_first) for entry in schedule])
    worker.plan([run.id for run in runs])
    fleet.give_slots(worker)
    to_forget, worker.to_forget = tuple(worker.to_forget), {}
    return Plan(
        schedule=runs,
        drop=tuple(entry.request.id for entry, copy in evict.items() if not copy),
        offload=tuple(entry.request.id for entry, copy in evict.items() if copy),
        to_forget=to_forget,
    )


def _run(
    entry: Entry, longest: int, choose_drafts: bool, prefill_chunk: int, some_elsewhere: bool, ready_first: bool
) -> Run:
    draft_len = entry.draft_len
    if choose_drafts and not draft_len and entry.rounds % PROBE_ROUNDS == 0:
        draft_len = 1
    draft_len = draft_len if draft_len < longest else longest
    if not some_elsewhere:
        return Run(entry.request.id, entry.placement, draft_len, prefill_chunk)
    yields = ready_first and entry.elsewhere and not (entry.due or entry.overdue)
    return Run(entry.request.id, entry.placement, draft_len, prefill_chunk, not entry.elsewhere, yields)
