"""How large each section of the check is and how long it may take, in full and in little. Plain data."""

from typing import NamedTuple

SECTIONS = ("machine", "exactness", "bench", "graphs", "preemption", "families")


class Plan(NamedTuple):
    section: str
    seconds: float  # at most
    least_s: float  # with less it is not begun


class Size(NamedTuple):
    minutes: float  # for all sections
    plans: tuple[Plan, ...]
    shape: str  # of worker_service.bench.synthetic
    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int  # of each answer
    long_prompt_tokens: int  # of the one long text among short ones
    preempted: tuple[int, int]  # requests, and tokens of each
    requests: int  # of exactness
    families: tuple[str, ...] | None  # None: all
    jobs: int  # families at once


PLANS = {
    "full": Size(
        minutes=8.6,
        plans=(
            Plan("machine", 90, 10),
            Plan("exactness", 110, 15),
            Plan("bench", 170, 25),
            Plan("graphs", 110, 25),
            Plan("preemption", 80, 20),
            Plan("families", 140, 20),
        ),
        shape="llama-8b",
        batches=(1, 2, 4, 8, 16, 32, 64),
        prompt_tokens=128,
        tokens=64,
        long_prompt_tokens=6144,
        preempted=(8, 2048),
        requests=24,
        families=None,
        jobs=6,
    ),
    "smallest": Size(
        minutes=50,  # minutes of one core, and a machine may be busy with other work
        plans=tuple(Plan(name, 600, 1) for name in SECTIONS),
        shape="tiny",
        batches=(1, 2),
        prompt_tokens=32,
        tokens=8,
        long_prompt_tokens=96,
        preempted=(2, 40),
        requests=3,
        families=("llama", "gemma2", "gpt-oss", "diffllama"),
        jobs=1,
    ),
}
