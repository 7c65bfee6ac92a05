"""`laps-sd bench engine --stages`: our engine over stages of this machine, with an artificial delay on links. What
speculation gains is compared with what its parts promise: one traversal of the links for a round, not for a token.
"""

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from worker_service.bench.limits import MAX_DRAFT_OVER_STAGES
from worker_service.bench.race import Answer, Batch, Rounds, System, race
from worker_service.bench.systems import Ours
from worker_service.engine.engine import Engine
from worker_service.engine.stages import Call
from worker_service.engine.types import Place
from worker_service.identity import fingerprint
from worker_service.model_files import ModelError
from worker_service.rendezvous import gather, listen
from worker_service.ring import Leader

TRIED = (2, 4, 6, 8, 12, MAX_DRAFT_OVER_STAGES)  # draft lengths
_START_S, _END_S = 300.0, 20.0


class SlowLinks(Leader):
    """Every link takes `link_s` longer. One message is under way at a time, so the first stage can wait for all of
    them: once round, there are as many links as stages."""

    link_s = 0.0

    def answer(self) -> Call:
        """The next call that came back, and not sooner than over slow links."""
        found = super().answer()
        if found.name == "compute":
            time.sleep(self.link_s * (len(self._links) + 1))
        return found


@contextmanager
def other_stages(directory: str, dtype: str, device: str, threads: int, size: int) -> Iterator[SlowLinks]:
    """The stages behind the first, as processes of this machine. Raises ModelError, ParallelError."""
    server, processes = listen("127.0.0.1:0", size), list[subprocess.Popen[str]]()
    words = [
        "--model",
        directory,
        "--dtype",
        dtype,
        "--device",
        device,
        "--threads",
        str(threads),
        "--stages",
        str(size),
    ]
    words += ["--rendezvous", f"127.0.0.1:{server.getsockname()[1]}", "--log-level", "error"]
    try:
        for number in range(1, size):
            command = [sys.executable, "-P", "-m", "worker_service", *words, "--stage", str(number)]
            processes.append(subprocess.Popen(command, text=True))
        about = {"model": fingerprint(Path(directory)), "dtype": f"torch.{dtype}"}
        links = SlowLinks(gather(Place(0, size), server, about, within_s=_START_S)._links)
        try:
            links.loaded()
            yield links
        finally:
            links.leave()
    finally:
        for process in processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class At:
    """A system over links of one delay."""

    def __init__(self, system: System, links: SlowLinks, link_s: float) -> None:
        self._system, self._links, self._link_s = system, links, link_s

    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        """Greedy, `max_tokens` for each prompt."""
        self._links.link_s = self._link_s
        return self._system.answer(batch, max_tokens)


def measure(
    engine: Engine,
    links: SlowLinks,
    options: Namespace,
    batches: Callable[[int], Sequence[Batch]],
    tuning: Callable[[int], Sequence[Batch]],
) -> Iterator[dict[str, Any]]:
    """A point for each batch size and delay. Raises ModelError if speculation changes a text."""
    for batch in options.batch:
        for link_ms in options.link_delay_ms:
            length = options.draft_len
            if length is None:
                length = _tuned(engine, links, link_ms / 1e3, tuning(batch), options.tokens)
            plain, ours = Ours(engine, 0), Ours(engine, length)
            systems: dict[str, System] = {
                "plain": At(plain, links, 0.0),
                "ours": At(ours, links, 0.0),
                "plain over links": At(plain, links, link_ms / 1e3),
                "ours over links": At(ours, links, link_ms / 1e3),
            }
            race(systems, batches(batch)[:1], options.tokens)  # warms up
            answers = race(systems, batches(batch), options.tokens)
            if len({str([answer.outputs for answer in each]) for each in answers.values()}) > 1:
                raise ModelError("speculation over links changed a text")
            yield {"batch": batch, "stages": options.stages, "link_ms": link_ms} | point(
                answers, options.stages, link_ms
            )


def point(answers: dict[str, list[Answer]], stages: int, link_ms: float) -> dict[str, Any]:
    """What one delay showed. `closed_form`: the gain that rounds without delays promise, once the links are added to
    each: k * (t0 + links) / (t_k + links), with k tokens a round. Rounds are the median ones: one that the machine
    slept through would ruin a sum. `spread`: the least and the greatest gain of a batch of prompts."""
    rounds = {name: [answer.rounds for answer in each] for name, each in answers.items()}
    round_s = {name: median(r.seconds / r.passes for r in each) for name, each in rounds.items()}
    total = {name: sum(each, Rounds()) for name, each in rounds.items()}
    k, links_s = total["ours"].acceptance_length, stages * link_ms / 1e3
    gains = [
        _rate(ours) / _rate(plain)
        for ours, plain in zip(rounds["ours over links"], rounds["plain over links"], strict=True)
    ]
    return {
        "draft_len": round(total["ours"].drafted / total["ours"].rows, 2),
        "tokens_a_round": k,
        "plain_tokens_per_s": _rate(total["plain over links"]),
        "tokens_per_s": _rate(total["ours over links"]),
        "gain": k * round_s["plain over links"] / round_s["ours over links"],
        "spread": [min(gains), max(gains)],
        "closed_form": k * (round_s["plain"] + links_s) / (round_s["ours"] + links_s),
        "round_ms": {name: 1e3 * seconds for name, seconds in round_s.items()},
    }


def _rate(rounds: Rounds) -> float:
    return rounds.tokens / rounds.seconds


def _tuned(engine: Engine, links: SlowLinks, link_s: float, batches: Sequence[Batch], tokens: int) -> int:
    systems: dict[str, System] = {str(length): At(Ours(engine, length), links, link_s) for length in TRIED}
    answers = race(systems, batches[:1], tokens)
    return int(max(answers, key=lambda name: _rate(sum((answer.rounds for answer in answers[name]), Rounds()))))
