"""Which faults strike when, drawn from a seed. Pure: who carries them out is strikes.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

LEADER, STANDBY, WORKER, GATEWAY, REDIS = PROCESSES = ("leader", "standby", "worker", "gateway", "redis")
DRAFTER, TO_DRAFTER = "drafter", "worker-drafter"  # of a stack that has one
LINKS = ("worker-scheduler", "gateway-scheduler", "scheduler-redis", "client-gateway")
KILL, STOP, RESTART = "kill", "stop", "restart"  # SIGKILL; SIGSTOP, later SIGCONT; SIGTERM
CUT, DELAY, THROTTLE, BLACKHOLE = "cut", "delay", "throttle", "blackhole"
LIE = "lie"  # or disorder: a drafter whose messages are wrong, lost, repeated, out of order or late

TOGETHER = 0.35  # share of faults that strike before the service has recovered from the one before
# How long what lasts does, in seconds, and how often: shorter than anybody's patience, longer than that with a silent
# scheduler (5 s), longer than that with a silent worker and that of a client (30 s).
LASTS_S = ((0.1, 2.5, 0.82), (5.0, 9.0, 0.15), (31.0, 40.0, 0.03))

# A worker takes seconds of computing to come up again, anything else a fraction.
WEIGHTS: Mapping[tuple[str, str], float] = {
    **{(kind, process): 1.0 for process in PROCESSES for kind in (KILL, STOP, RESTART)},
    **{(kind, link): 0.7 for link in LINKS for kind in (CUT, DELAY, THROTTLE, BLACKHOLE)},
    (KILL, WORKER): 0.8,
    (RESTART, WORKER): 0.4,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`after_s`: the one before; `together`: whether the service has recovered from that or not. `which` of the
    processes or links of that name, modulo their number. `strength`, in [0, 1), says how much it delays or throttles,
    and which way it holds up."""

    kind: str
    target: str
    after_s: float
    together: bool
    which: int
    lasts_s: float
    strength: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


# Where the drafter and its links are struck, and nobody else.
OF_DRAFTER: Mapping[tuple[str, str], float] = {
    **{(kind, DRAFTER): 1.0 for kind in (KILL, STOP, RESTART)},
    **{(kind, TO_DRAFTER): 1.0 for kind in (CUT, DELAY, THROTTLE, BLACKHOLE)},
    (LIE, DRAFTER): 4.0,
}


def schedule(seed: int, count: int, weights: Mapping[tuple[str, str], float] = WEIGHTS) -> list[Fault]:
    """The same one for the same arguments."""
    random = Random(seed)
    faults = []
    for kind, target in random.choices(list(weights), list(weights.values()), k=count):
        together = random.random() < TOGETHER
        ((low, high, _),) = random.choices(LASTS_S, [share for _, _, share in LASTS_S])
        lasts_s = random.uniform(low, high)
        after_s = random.uniform(0.0, 0.7)
        faults.append(Fault(kind, target, after_s, together, random.randrange(12), lasts_s, random.random()))
    return faults
