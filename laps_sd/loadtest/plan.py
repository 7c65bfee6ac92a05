"""What a load test sends and when: arrivals, lengths and prompts, drawn from a seed. Sends nothing, reads no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, cycle, islice
from random import Random

from laps_sd.own_prompts import BOUNDS, texts
from scheduler_service.sim.workload import Job

CHARACTERS_A_TOKEN = 4  # about; only the server knows
EVEN = 1e12  # a burstiness from here on makes gaps that are equal
CONTEXT_SHARE = 0.5  # of the context, which an output keeps if prompt and output do not fit together

# One token each in common vocabularies. `Words` holds what they are in the server's.
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people
"""
_VOCABULARY = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be sent. `due_s`: seconds after the start; None: as soon as a client is free (closed loop)."""

    index: int
    due_s: float | None
    prompt: str  # empty: a synthetic prompt of `prompt_tokens` tokens is made
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool
    predicted_tokens: int | None = None
    klass: str = "default"
    category: str = ""
    measured: bool = True  # False: it warms the server up, no figure counts it
    stop: tuple[str, ...] = ()  # strings that end the answer


@dataclass(frozen=True, slots=True)
class Words:
    """Makes synthetic prompts. `per_word`: tokens of a word; `extra`: tokens of a prompt beside those of its words."""

    per_word: float = 1.0
    extra: float = 0.0

    def text(self, tokens: int, index: int) -> str:
        """A prompt of about `tokens` tokens, equal for equal arguments. Different indexes share no prefix."""
        count = max(1, round((tokens - self.extra) / self.per_word))
        return " ".join(Random(f"prompt {index}").choices(_VOCABULARY, k=count))


def arrivals(
    count: int, rate: float, *, burstiness: float = 1.0, ramp_to: float | None = None, seed: int = 0
) -> list[float]:
    """`count` arrival times in seconds, the first at 0. `rate`: arrivals a second; infinite: all at once.

    Gaps have a gamma distribution with shape `burstiness`, as in `vllm bench serve`: 1 is a Poisson process, less comes
    in bursts, infinity at equal gaps. `ramp_to`: the rate changes from `rate` to this in equal steps, one for each
    request.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = Random(f"arrivals {seed}")
    last = rate if ramp_to is None else ramp_to
    steps = max(1, count - 2)
    rates = (rate + (last - rate) * step / steps for step in range(count - 1))
    even = burstiness >= EVEN
    gaps = (1 / now if even else rng.gammavariate(burstiness, 1 / (now * burstiness)) for now in rates)
    return list(accumulate(gaps, initial=0.0))


def own(count: int, seed: int = 0) -> list[Job]:
    """Jobs with the project's own prompts, one of each kind in turn. Their answers end by themselves or at a bound that
    is drawn from BOUNDS, so that they are short and long."""
    rng = Random(f"prompts {seed}")
    kinds: dict[str, list[str]] = {}
    for kind, text in texts():
        kinds.setdefault(kind, []).append(text)
    mixed = chain.from_iterable(zip(*(rng.sample(some, len(some)) for some in kinds.values()), strict=True))
    return [
        Job(
            f"{index:07d}",
            arrival_s=0.0,
            prompt_tokens=len(text) // CHARACTERS_A_TOKEN,
            output_tokens=0,
            category=category,
            prompt=text,
            max_tokens=rng.choice(BOUNDS),
        )
        for index, (category, text) in enumerate(islice(zip(cycle(kinds), cycle(mixed), strict=False), count))
    ]


def synthetic(count: int, prompt_tokens: int, output_tokens: int) -> list[Job]:
    """Jobs of equal lengths, without texts."""
    return [Job(f"{index:07d}", 0.0, prompt_tokens, output_tokens) for index in range(count)]


def repeated(jobs: Sequence[Job], count: int) -> list[Job]:
    """The first `count` jobs; after the last one the list starts again."""
    return list(islice(cycle(jobs), count))


def rescaled(
    jobs: Sequence[Job], *, speed: float = 1.0, length_scale: float = 1.0, spread_s: float = 0.0, seed: int = 0
) -> list[Job]:
    """A trace changed to fit a slower or faster machine: `speed` divides arrival times, `length_scale` multiplies token
    counts, predicted ones and bounds too. `spread_s`: each arrival is delayed by a random time up to this, for traces
    with a coarse clock.
    """

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * length_scale))

    rng = Random(f"spread {seed}")
    first_s = min(job.arrival_s for job in jobs)
    moved = [
        replace(
            job,
            arrival_s=(job.arrival_s - first_s + (rng.uniform(0, spread_s) if spread_s else 0.0)) / speed,
            prompt_tokens=scaled(job.prompt_tokens),
            output_tokens=scaled(job.output_tokens) if job.output_tokens else 0,
            predicted_output_tokens=scaled(job.predicted_output_tokens) if job.predicted_output_tokens else None,
            max_tokens=scaled(job.max_tokens) if job.max_tokens else None,
        )
        for job in jobs
    ]
    return sorted(moved, key=lambda job: job.arrival_s)


def clipped(jobs: Sequence[Job], context_tokens: int, max_tokens: int) -> tuple[list[Job], int]:
    """The jobs, cut to fit the context, and how many were cut. Texts stay: only the server knows their tokens. An
    output that leaves them nothing gets half the context. `max_tokens`: as in `plan`.

    Of others the prompt is cut first, but not below half the context; then the output.
    """
    fitting, cut = [], 0
    for job in jobs:
        prompt, output = 0 if job.prompt else job.prompt_tokens, asked_tokens(job, max_tokens)
        if prompt + output > context_tokens or output >= context_tokens:
            rest = 0 if job.prompt else context_tokens - max(1, prompt)
            output = min(output, max(int(CONTEXT_SHARE * context_tokens), rest))
            prompt = job.prompt_tokens if job.prompt else min(prompt, context_tokens - output)
            job = replace(job, prompt_tokens=prompt)
            job = replace(job, output_tokens=output) if job.output_tokens else replace(job, max_tokens=output)
            cut += 1
        fitting.append(job)
    return fitting, cut


def asked_tokens(job: Job, max_tokens: int) -> int:
    """Output tokens that its request asks for at most. `max_tokens`: as in `plan`."""
    return job.output_tokens or job.max_tokens or max_tokens


def plan(
    jobs: Sequence[Job], due_s: Sequence[float | None], *, max_tokens: int, ignore_eos: bool, warmup: int
) -> list[Planned]:
    """The requests in order. `max_tokens`: for jobs without an output length; those with one ignore the end token."""
    return [
        Planned(
            index=index,
            due_s=due,
            prompt=job.prompt,
            prompt_tokens=job.prompt_tokens,
            max_tokens=asked_tokens(job, max_tokens),
            ignore_eos=ignore_eos or job.output_tokens > 0,
            predicted_tokens=job.predicted_output_tokens,
            klass=job.klass.name.lower(),
            category=job.category,
            measured=index >= warmup,
        )
        for index, (job, due) in enumerate(zip(jobs, due_s, strict=True))
    ]
