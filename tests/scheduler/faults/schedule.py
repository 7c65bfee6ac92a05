"""A schedule: what is served by whom, and what goes wrong when. All of it follows from one integer."""

import random
from dataclasses import dataclass, field

from tests.scheduler.faults.model import BLOCK_TOKENS

PROCESS_FAULTS = ("kill", "vanish", "freeze", "stop")
LINK_FAULTS = ("cut", "half-open", "hold", "slow")
STORE_FAULTS = ("refused", "unanswered", "late", "away", "hang", "forget", "wipe", "evict")
MANNERS = ("plain", "detached", "cancels", "hangs up", "leaves and resumes", "twice", "deadline", "conflict")


@dataclass(frozen=True)
class Job:
    """A client's request, and its manner."""

    id: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    manner: str
    gateway: int  # that it asks first
    after: int  # tokens, until it does what its manner says
    urgent: bool = False

    @property
    def detached(self) -> bool:
        return self.manner in ("detached", "leaves and resumes")


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    target: str = ""
    other: str = ""  # the other end of a link
    seconds: float = 0.0
    steps: int = 0  # of the process, after `at_s`


@dataclass(frozen=True)
class Schedule:
    seed: int
    pair: bool
    workers: int
    gateways: int
    slots: int
    blocks: int
    host_blocks: int
    round_s: float
    settings: tuple[tuple[str, object], ...]  # of the schedulers
    jobs: tuple[Job, ...] = field(repr=False)
    faults: tuple[Fault, ...]

    @property
    def schedulers(self) -> tuple[str, ...]:
        return ("s0", "s1") if self.pair else ("s0",)


def schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    pair = rng.random() < 0.6
    gateways = rng.choice((1, 1, 2))
    workers = rng.choice((1, 2, 2))
    jobs = tuple(_job(rng, number, gateways) for number in range(rng.randint(2, 6)))
    largest = max(len(job.prompt) + job.max_tokens for job in jobs) // BLOCK_TOKENS + 6
    within_ms = (0, 0, 20, 100)[seed % 4]
    settings = (
        ("policy", rng.choice(("default", "laps-sd", "fcfs", "las", "sjf"))),
        ("draft_len", rng.choice((0, 2, 4, "auto"))),
        ("max_pending_steps", rng.choice((1, 3, 16))),
        ("max_lag", max(rng.choice((1, 4, 16)), 8 if within_ms else 0)),
        ("max_live", rng.choice((3, 100))),
        ("prefill_chunk", rng.choice((4, 256))),
        ("report_within_ms", within_ms),
    )
    made = Schedule(
        seed=seed,
        pair=pair,
        workers=workers,
        gateways=gateways,
        slots=rng.choice((1, 2, 3)),
        blocks=largest * rng.choice((1, 1, 2, 5)),
        host_blocks=rng.choice((0, 0, largest)),
        round_s=rng.choice((0.003, 0.01, 0.03)),
        settings=settings,
        jobs=jobs,
        faults=(),
    )
    at_s, faults = 0.0, []
    for _ in range(rng.randint(1, 5)):
        # Another one while the last one still works, or while everybody recovers from it; or much later.
        at_s = at_s + rng.choice((0.01, 0.1, 0.9)) * rng.uniform(0.5, 1.5) if at_s and rng.random() < 0.6 else 0.0
        at_s = at_s or rng.uniform(0.0, 1.2)
        faults.append(_fault(rng, made, at_s))
    return Schedule(**vars(made) | {"faults": tuple(faults)})


def _job(rng: random.Random, number: int, gateways: int) -> Job:
    length = rng.choice((1, 3, 8, 20, 40, 60))
    prompt = (number + 1, length, *(rng.randrange(1, 1000) for _ in range(rng.choice((1, 5, 20)))))
    return Job(
        id=f"r{number}",
        at_s=rng.uniform(0.0, 1.2),
        prompt=prompt,
        max_tokens=rng.choice((length, length + 5, max(1, length // 2))),
        manner=rng.choice(MANNERS[:2] * 2 + MANNERS),
        gateway=rng.randrange(gateways),
        after=rng.randint(0, length),
        urgent=rng.random() < 0.2,
    )


def _fault(rng: random.Random, of: Schedule, at_s: float) -> Fault:
    servers = [*of.schedulers] * 3 + [f"w{n}" for n in range(of.workers)] + [f"g{n}" for n in range(of.gateways)]
    seconds = rng.choice((0.02, 0.2, 0.6, 1.0, 2.5)) * rng.uniform(0.5, 1.5)
    kinds = PROCESS_FAULTS * 3 + LINK_FAULTS * 2 + STORE_FAULTS + (("jump",) if rng.random() < 0.5 else ())
    kind = rng.choice(kinds)
    target = rng.choice(servers)
    if kind in STORE_FAULTS:
        return Fault(at_s, kind, "store", seconds=seconds)
    if kind in LINK_FAULTS:
        peers = [f"g{n}" for n in range(of.gateways)] if target == "c" else of.schedulers
        if target[0] == "s":
            peers = [f"w{n}" for n in range(of.workers)] + [f"g{n}" for n in range(of.gateways)]
        elif target[0] == "g":
            peers = ["c", *of.schedulers]
        return Fault(at_s, kind, target, rng.choice(list(peers)), seconds)
    if kind == "freeze" and rng.random() < 0.3:
        seconds += 6.0  # longer than anybody waits for a word
    if kind == "jump":
        # Less than the hour that a request may live by a gateway's clock: by this one it would be over.
        seconds = rng.choice((-3000.0, -1.0, 1.0, 3000.0)) * rng.random()
    return Fault(at_s, kind, target, seconds=seconds, steps=rng.choice((0, rng.randrange(60))))
