"""A toy engine, and a game against it: at every step somebody else may run, is paused, dropped, aborted, drafts less.
The texts must not show it. Assertions are the tests'."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from laps_sd_vllm.directed import Desired, Place, StepDone
from tests.vllm.drive import add, make_core, run_all, step
from tests.vllm.toy import ToyExecutor, continued

BLOCK = 32
DIRECTED = "laps_sd_vllm.directed.DirectedScheduler"


@dataclass
class Way:
    """One of the forms in which vLLM runs. `blocks`: of KV."""

    v2: bool
    asynchronous: bool
    drafts: int
    blocks: int = 400

    def __str__(self) -> str:
        ways = "v2" if self.v2 else "v1", "async" if self.asynchronous else "sync"
        return "-".join([*ways, f"k{self.drafts}", f"{self.blocks}blocks"])


def toy_core(way: Way, scheduler: Any = DIRECTED, executor: Any = ToyExecutor, **arguments: Any) -> Any:
    speculation = {"method": "ngram", "num_speculative_tokens": way.drafts, "prompt_lookup_max": 4}
    given: dict[str, Any] = {
        "block_size": BLOCK,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 12,
        "max_model_len": 512,
    }
    if way.drafts:
        given["speculative_config"] = speculation
    return make_core(
        scheduler,
        asynchronous=way.asynchronous,
        v2=way.v2,
        blocks=way.blocks,
        distributed_executor_backend=executor,
        **(given | arguments),
    )


@dataclass
class Played:
    """The result of a game. `rows`: tokens by request as the reports tell them."""

    prompts: dict[str, list[int]]
    lengths: dict[str, int]
    texts: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    disorder: list[str] = field(default_factory=list)  # reports that do not begin where the last one ended
    excess: list[int] = field(default_factory=list)  # how many ran where fewer were to
    uncounted: list[str] = field(default_factory=list)  # rows whose tokens do not follow from acceptance

    @property
    def wrong(self) -> list[str]:
        wanted = {id: continued(prompt, self.lengths[id]) for id, prompt in self.prompts.items()}
        cut = {id: text[: len(self.texts.get(id, []))] if id in self.aborted else text for id, text in wanted.items()}
        return [id for id, text in cut.items() if self.texts.get(id, []) != text]


def play(core: Any, seed: int, did: Counter[str], *, requests: int = 16, most_slots: int = 5) -> Played:
    """One game: until all requests have ended or were aborted."""
    rng, scheduler = random.Random(seed), core.scheduler
    shared = [rng.randrange(600, 1000) for _ in range(2 * BLOCK)]
    played = Played({}, {})
    for number in range(requests):
        own = [rng.randrange(600, 1000) for _ in range(rng.randint(1, 150))]
        id = f"game{seed}-{number}"
        played.prompts[id] = shared + own if number % 3 == 0 else own
        played.lengths[id] = rng.randint(1, 60)
        played.texts[id], played.rows[id] = [], []
    done: list[StepDone] = []
    scheduler.on_step = done.append
    todo, live = list(played.prompts), set[str]()
    most_drafts = scheduler.num_spec_tokens
    while todo or live:
        while todo and rng.random() < 0.5:
            id = todo.pop()
            add(core, id, played.prompts[id], played.lengths[id])
            live.add(id)
        ids = sorted(live)
        rng.shuffle(ids)
        slots = rng.randint(1, most_slots)
        listed = ids[: rng.randint(0, len(ids))]
        scheduler.desired = Desired([Place(id, rng.randint(0, most_drafts)) for id in listed], slots)
        if ids and rng.random() < 0.2:
            victim = rng.choice(ids)
            did["drops"] += bool(scheduler.requests[victim].num_computed_tokens)
            scheduler.drop(victim)
        if ids and rng.random() < 0.02:
            victim = rng.choice(ids)
            core.abort_requests([victim])
            live.discard(victim)
            played.aborted.add(victim)
            did["aborts"] += 1
        if scheduler.has_requests():
            for id, (tokens, ended) in step(core).items():
                played.texts[id].extend(tokens)
                if ended:
                    live.discard(id)
        running, _ = scheduler.get_request_counts()
        did["pauses"] += len(scheduler.running) - running
        _check_reports(done, played, slots, most_slots, did)
    for id, tokens in run_all(core).items():
        played.texts[id].extend(tokens)
    _check_reports(done, played, most_slots, most_slots, did)
    scheduler.desired, scheduler.on_step = None, lambda done: None
    return played


def _check_reports(done: list[StepDone], played: Played, slots: int, most_slots: int, did: Counter[str]) -> None:
    for one in done:
        did["steps"] += 1
        ran = [row for row in one.rows if not row.evicted]
        if len(ran) > most_slots:
            played.excess.append(len(ran))
        for row in one.rows:
            did["evictions"] += row.evicted
            did["drafted tokens"] += row.drafted
            did["accepted tokens"] += row.accepted
            if row.start != len(played.rows[row.request_id]):
                played.disorder.append(row.request_id)
            played.rows[row.request_id] += row.tokens
            if row.drafted and row.status is None and len(row.tokens) != row.accepted + 1:
                played.uncounted.append(row.request_id)
    done.clear()


def ways(*, blocks: tuple[int, ...] = (400, 40)) -> Iterator[Way]:
    for v2 in (False, True):
        for asynchronous in (False, True):
            for drafts in (0, 1, 4):
                for each in blocks:
                    yield Way(v2, asynchronous, drafts, each)
