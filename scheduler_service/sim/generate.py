"""Seeded generators of workloads. Equal seeds give equal workloads; nothing here knows of policies."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, WorkloadError

MOST_SIGMA = 20  # e to the power of some hundreds is no float any more
LONGEST_SCRIPT = 512  # rounds drawn for one request; then its script starts over

# Kinds of requests. Acceptance is that of Vicuna-7B with EAGLE on the matching categories of Spec-Bench (answers of
# yukiki-jc/Spec-Bench, Apache-2.0): `alpha` and its strength give the tokens of a round the same mean and the same
# deviation between requests, at draft length 5. Only means and coefficients of variation are taken from the sources.
KINDS: Mapping[str, Mapping[str, float]] = {
    # Azure LLM inference trace 2023, conversation (Patel et al., Splitwise, ISCA 2024); 3.64 tokens a round.
    "chat": {"prompt_tokens": 1155, "output_mean": 211, "output_cv": 0.77, "alpha": 0.79, "alpha_strength": 32},
    # Prompts and solutions of MBPP (Austin et al. 2021, arXiv 2108.07732); 4.51 tokens a round.
    "code": {"prompt_tokens": 106, "output_mean": 58, "output_cv": 0.73, "alpha": 0.88, "alpha_strength": 80},
    # Problems and solutions of MATH-500 (Hendrycks et al. 2021, arXiv 2103.03874); 3.89 tokens a round.
    "reasoning": {"prompt_tokens": 69, "output_mean": 210, "output_cv": 0.82, "alpha": 0.82, "alpha_strength": 100},
    # DeepSeek-R1 in production, thinking included (ServeGen, alibaba/ServeGen); acceptance as for reasoning.
    "thinking": {"prompt_tokens": 690, "output_mean": 819, "output_cv": 1.61, "alpha": 0.82, "alpha_strength": 100},
}
MIX = ("chat", "code", "reasoning")  # the kinds of the LAPS-SD paper


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Log-normal lengths, acceptance that differs between requests and drifts early, noisy predictions.

    `load` is lambda * E[rounds] * step(slots) / slots plus prefill; 1 saturates. `arrival_cv` is that of the gaps
    between arrivals: 1 is Poisson, more comes in bursts; `load=inf` has all arrive at once. `kind` sets prompts,
    lengths and acceptance to those of KINDS, request by request in turn if it is `mix`.
    """

    requests: int = 1100
    load: float = 0.85
    arrival_cv: float = 1.0
    prompt_tokens: int = 100  # mean, exponential
    output_mean: float = 200.0  # tokens
    output_cv: float = 1.1
    sigma: float = 0.5  # of the log of predicted / true length; inf: predictions are pure noise
    predicted: bool = True
    alpha: float = 0.65  # mean probability that one draft token is accepted
    alpha_strength: float = 8.0  # a + b of its Beta distribution over requests
    drift_rounds: float = 8.0  # how fast a request's acceptance approaches its own level
    kind: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("", *KINDS, "mix"):
            raise ValueError(f"kind must be one of {', '.join(KINDS)} or mix")
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}")
        if not (0 <= self.sigma <= MOST_SIGMA or self.sigma == math.inf):
            raise ValueError(f"sigma must be from 0 to {MOST_SIGMA}, or inf")

    def parts(self) -> "list[Synthetic]":
        """What its requests are drawn from, in turn."""
        kinds = MIX if self.kind == "mix" else (self.kind,)
        return [replace(self, kind=kind, **KINDS.get(kind, {})) for kind in kinds]  # type: ignore[arg-type]


_RANGES = (
    ("requests", 1, 10_000_000),
    ("load", 1e-3, math.inf),
    ("arrival_cv", 0.1, 20),
    ("prompt_tokens", 1, 1_000_000),
    ("output_mean", 1, 100_000),
    ("output_cv", 0.01, 10),
    ("alpha", 0.01, 0.99),
    ("alpha_strength", 0.1, 10_000),
    ("drift_rounds", 0, 10_000),
)


def parse_synthetic(text: str) -> Synthetic:
    """`name=value,name=value` as a Synthetic. Raises WorkloadError."""
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(Synthetic)}
    values: dict[str, float | bool] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise WorkloadError(f"synthetic: {name!r} is not a setting; known: {', '.join(kinds)}")
        try:
            values[name] = {"true": True, "false": False}[value] if kinds[name] is bool else kinds[name](value)
        except (KeyError, ValueError):
            raise WorkloadError(f"synthetic: {name}: {value!r} is no {kinds[name].__name__}") from None
    try:
        return Synthetic(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise WorkloadError(f"synthetic: {error}") from None


def generate(what: Synthetic, seed: int, fleet: SimFleet) -> list[Job]:
    """The same lengths and acceptances for every load, so that loads can be compared."""
    rng = Random(f"jobs {seed}")
    parts = what.parts()
    jobs = [_job(parts[index % len(parts)], index, rng, fleet.reference_draft) for index in range(what.requests)]
    return at_load(jobs, what, seed, fleet)


def at_load(jobs: Sequence[Job], what: Synthetic, seed: int, fleet: SimFleet) -> list[Job]:
    """`jobs` with new arrivals, in their order, at the load of `what` on this fleet."""
    if math.isinf(what.load):
        return [replace(job, arrival_s=0.0) for job in jobs]
    draft_len, slots = min(fleet.reference_draft, max(job.draft_len for job in jobs)), fleet.slots
    round_s = fleet.costs.step_s(draft_len, slots, slots * (draft_len + 1), 0, 0) / slots
    work_s = sum(job.rounds(draft_len) * round_s for job in jobs)
    work_s += 1e-3 * fleet.costs.t_prefill_ms_per_token * sum(job.prompt_tokens for job in jobs)
    times_s = _arrivals(work_s / len(jobs) / fleet.workers / what.load, what.arrival_cv, seed)
    return [replace(job, arrival_s=arrival_s) for job, arrival_s in zip(jobs, times_s, strict=False)]


def with_acceptance(jobs: Iterable[Job], draft_len: int, seed: int) -> list[Job]:
    """`jobs` with a script of accepted drafts for those that came without one."""
    plain = Synthetic()
    return [
        job
        if job.accepted
        else replace(
            job, accepted=_script(plain, Random(f"{job.id} {seed}"), draft_len, job.output_tokens), draft_len=draft_len
        )
        for job in jobs
    ]


def _job(what: Synthetic, index: int, rng: Random, draft_len: int) -> Job:
    spread = math.sqrt(math.log1p(what.output_cv**2))
    location = math.log(what.output_mean) - spread**2 / 2
    length = max(1, round(rng.lognormvariate(location, spread)))
    error = rng.gauss(0, 1)
    # Useless predictions have the same distribution as the lengths but nothing to do with them.
    guess = math.exp(location + spread * error) if math.isinf(what.sigma) else length * math.exp(what.sigma * error)
    return Job(
        id=f"{index:07d}",
        arrival_s=0.0,
        prompt_tokens=max(1, round(rng.expovariate(1 / what.prompt_tokens))),
        output_tokens=length,
        accepted=_script(what, rng, draft_len, length),
        draft_len=max(1, draft_len),
        predicted_output_tokens=max(1, round(guess)) if what.predicted else None,
        category=what.kind,
    )


def _script(what: Synthetic, rng: Random, draft_len: int, length: int) -> tuple[int, ...]:
    """Accepted drafts of each round: a run of successes cut at draft_len, with a probability of the request's own."""
    a, b = what.alpha * what.alpha_strength, (1 - what.alpha) * what.alpha_strength
    own, first = rng.betavariate(a, b), rng.betavariate(a, b)
    script: list[int] = []
    emitted = 0
    while emitted < length and len(script) < LONGEST_SCRIPT:
        fade = math.exp(-len(script) / what.drift_rounds) if what.drift_rounds else 0.0
        probability = own + (first - own) * fade
        accepted = 0
        while accepted < draft_len and rng.random() < probability:
            accepted += 1
        script.append(accepted)
        emitted += accepted + 1
    return tuple(script)


def _arrivals(gap_s: float, cv: float, seed: int) -> Iterator[float]:
    """Gamma-distributed gaps of that mean and coefficient of variation; exponential ones if it is 1."""
    rng = Random(f"arrivals {seed}")
    now = 0.0
    while True:
        yield now
        now += rng.gammavariate(cv**-2, gap_s * cv**2)
