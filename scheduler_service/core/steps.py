"""One report of a worker: what the rounds in it change. Knows nothing of submissions and of workers that come and go.

Most rows of a report change nothing but output, acceptance and key of their requests. They all share one effect,
`WentOn`; a record is made for the others alone.
"""

from scheduler_service.core.charges import charge
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.events import Round, StepDone
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.types import Advanced, Changed, Effect, Ended, Finish, WentOn

Ran = dict[str, tuple[Entry, Round]]


def step_done(fleet: Fleet, step: StepDone, now: float) -> tuple[Effect, ...]:
    """Fold the report into the fleet. Rows that are stale change nothing."""
    known = fleet.known
    worker = fleet.workers[step.worker]
    worker.free_blocks = step.free_blocks
    worker.reports += 1
    fleet.load.step_done(worker, step, fleet.draft_len, now)
    worker.obeyed(worker.planned if step.plan is None else step.plan)
    ran, stopped, deferred = _ran(fleet, step)
    unreported = worker.running - ran.keys() - deferred
    beside = [id for id in unreported if fleet.runs_on(worker, id)] if step.partial else []
    if not step.partial:
        stopped |= unreported
    if fleet.overtaking:
        served = [(entry.request, _counted(fleet, entry, row), len(row.each) or 1) for entry, row in ran.values()]
        fleet.overtaking.served(served, [fleet.entries[id].request for id in beside])
    workers = len(fleet.workers)
    charge(fleet.classes, ran.values(), known.round_s / known.slots / workers, known.cost.prefill_token_s / workers)
    went_on: list[str] = []
    effects: list[Effect] = []
    began = now - step.duration_s
    for entry, row in ran.values():
        _serve(fleet, entry, row, began, now)
        if row.finish is not None:
            effects.append(finish(fleet, worker, entry, row))
            continue
        fleet.rank(entry)
        if entry.changed or row.prefilled or not row.new:
            effects.append(Advanced(entry.record_to_write(), row.start))
        else:
            went_on.append(row.id)
    if went_on:
        effects.append(WentOn(tuple(went_on)))
    fleet.give_slots(worker)
    effects += _preempt(fleet, worker, stopped)
    worker.running = {id for id, (entry, _) in ran.items() if entry.state is State.RUNNING}
    worker.running.update([id for id in (*beside, *deferred) if fleet.runs_on(worker, id)])
    if fleet.overtaking:
        for entry in [fleet.entries[id] for id in fleet.overtaking.overdue()]:
            entry.overdue = True
            fleet.rank(entry)
    if fleet.pauses:
        for entry in fleet.pauses.due(fleet.entries, known.round_s, now):
            entry.due = True
            fleet.rank(entry)
    return tuple(effects)


def _ran(fleet: Fleet, step: StepDone) -> tuple[Ran, set[str], set[str]]:
    """The rows with rounds that count, with their requests; and the ids of the requests that were skipped, and of those
    that were only deferred: these go on. A row is stale if its request was moved or has ended, or if its worker ran
    ahead of what is durable."""
    ran: Ran = {}
    skipped: set[str] = set()
    deferred: set[str] = set()
    name, entries = step.worker, fleet.entries
    for row in step.rounds:
        entry = entries.get(row.id)
        if entry is None or entry.home != name or entry.placement != row.placement or entry.emitted != row.start:
            continue
        entry.blocks = row.blocks
        entry.prefill_owed = row.prefill_owed
        if row.each or not row.skipped:  # row.count > 0, written out: this is done for every row
            entry.offloaded = 0
            ran[row.id] = entry, row
        if row.skipped:
            (deferred if row.deferred else skipped).add(row.id)
    return ran, skipped, deferred


def _counted(fleet: Fleet, entry: Entry, row: Round) -> int:
    """Rounds that it was believed to need still when the last round of this row began."""
    if not row.each:
        return entry.rounds_counted
    emitted = row.start + row.new - row.each[-1][0]
    return fleet.rounds_for(entry.forecast.remaining(emitted - entry.since))


def _serve(fleet: Fleet, entry: Entry, row: Round, began: float, now: float) -> None:
    """The request got this round."""
    known, policy = fleet.known, fleet.policy
    if entry.state is not State.RUNNING:
        entry.move(Move.RUN)
    if entry.started is None:
        entry.started = began
    if fleet.pauses and row.new:
        if not entry.emitted:
            fleet.pauses.began(row.id)
        entry.last_token_s, entry.due = now, False
    entry.emitted += row.new
    entry.remaining_tokens = entry.forecast.remaining(entry.emitted - entry.since)
    if row.reading is not None:
        fleet.read(entry, row.reading)
    if row.prefilled:  # the whole batch waits for it, and it may take rounds of a slot
        entry.prefilled = min(entry.request.prompt_tokens, entry.prefilled + row.prefilled)
        batch_s = row.prefilled * known.cost.prefill_token_s * known.slots
        entry.kv_s += batch_s + known.round_s  # which makes one token at most
    perceptive = policy.perceptive
    each = row.each or ((row.new, row.drafted, row.accepted),)
    for number, (new, drafted, accepted) in enumerate(each, 1):
        if not row.prefilled:
            entry.served_s += known.round_s
        if new and entry.probation:
            fleet.isolation.served(entry)
        if drafted or (new and not row.prefilled):
            # Drafts that were asked for elsewhere and did not come tell nothing of how many would have been accepted.
            told = drafted > 0 or not (entry.elsewhere and entry.draft_len)
            entry.acceptance = entry.acceptance.after(drafted, accepted, new, keep_means=perceptive and told)
        if perceptive and not entry.perceptible:
            goes_on = row.finish is None or number < len(each)
            if goes_on and policy.perceives(entry):
                entry.perceptible = entry.changed = True


def finish(fleet: Fleet, worker: Worker, entry: Entry, row: Round) -> Ended:
    """The worker has ended the request with this round."""
    worker.listed.pop(row.id, None)
    if row.finish is Finish.ERROR:
        return fleet.end(entry, Move.FAIL, row.finish, row.start)
    ended = fleet.end(entry, Move.FINISH, row.finish, row.start)
    if not ended.teaches:
        return ended
    known = fleet.known
    known.length.observe(entry.emitted, entry.request.predicted_tokens, cut=ended.cut)
    known.acceptance.observe(entry.acceptance)
    known.probe.observe(entry.readings, entry.emitted, cut=ended.cut)
    if fleet.policy.learns:
        fleet.refit.learned(known.length, known.acceptance)
    return ended


def _preempt(fleet: Fleet, worker: Worker, stopped: set[str]) -> list[Effect]:
    """Those that ran before, and did not run in the last round of this report, were preempted."""
    effects: list[Effect] = []
    for id in sorted(stopped):
        if fleet.runs_on(worker, id):
            entry = fleet.entries[id]
            entry.move(Move.PREEMPT)
            entry.preemptions += 1
            fleet.rank(entry)
            effects.append(Changed(entry.record_to_write()))
    return effects
