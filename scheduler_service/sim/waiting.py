"""Those that wait while the lean loop (lean.py) runs others: who they are, who of them may start there, and whether
memory is enough. Changes nothing."""

from math import inf

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key
from scheduler_service.sim.accounts import Accounts, Shell
from scheduler_service.sim.worker import UNBOUNDED, SimFleet, SimWorker


class Waiting:
    """Of one worker. `like`: what it is like."""

    def __init__(self, shell: Shell, accounts: Accounts, fleet: Fleet, sim_worker: SimWorker, like: SimFleet) -> None:
        self._shell, self._accounts, self._fleet, self._sim_worker = shell, accounts, fleet, sim_worker
        self._worker: Worker = fleet.workers[sim_worker.name]
        self._budget, self._chunk, self._slots = like.kv_budget_tokens, like.prefill_chunk, like.slots

    def may_run(self) -> bool:
        fleet = self._fleet
        groups = {name[-2:] for name in (*self._worker.ranking.groups, *fleet.unplaced.groups)}
        return len(groups) <= 1 and not fleet.refit.pending and self._worker.memory_tokens >= fleet.largest

    def settled(self, entry: Entry) -> bool:
        """Whether nothing but its claim decides when it runs."""
        return not (entry.due or entry.probation or entry.offloaded or self._shell.job(entry.request.id).readings)

    def best(self, count: int) -> list[Key]:
        """The best of those that do not run."""
        runs, unplaced = self._accounts.runs, self._fleet.unplaced
        keys = [key for key in self._worker.ranking.first(len(runs) + count) if key[-1] not in runs][:count]
        best = unplaced.at(0)
        if best is not None and (len(keys) < count or best < keys[-1]):
            keys = sorted([*keys, *unplaced.first(count)])[:count]
        return keys

    def may_start(self, entry: Entry) -> bool:
        if not self.settled(entry):
            return False
        if entry.state is State.PAUSED:
            return not entry.prefill_owed and self._sim_worker.holds_all(entry)
        new = not entry.emitted and entry.prefill_owed == entry.tokens <= self._chunk
        return new and not self._sim_worker.holds_any(entry)

    def fit(self, waiting: list[Key]) -> float:
        """For how many rounds more memory is enough for all that is listed, as the core counts it. Negative: not even
        now."""
        if self._budget >= UNBOUNDED:
            return inf
        held = {id: entry.tokens for id, entry in self._fleet.entries.items() if entry.blocks}
        for id, run in self._accounts.runs.items():
            held[id] = run.entry.request.prompt_tokens + run.course.tokens[self._accounts.round - run.offset]
        new = sum([self._fleet.entries[key[-1]].tokens for key in waiting if key[-1] not in held])
        each, listed = self._worker.round_tokens, len(waiting) + len(self._accounts.runs)
        return (self._budget - sum(held.values()) - new - 2 * each * listed) // (each * self._slots)
