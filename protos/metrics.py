"""Metrics as all services declare them: families with a name, a type and a meaning, read when Prometheus asks. What is
measured lives in the services; the HTTP port that serves it is in observed.py.

Everything is counted in the thread of the event loop that also answers Prometheus, or in one other thread: no locks.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

PREFIX = "laps_sd_"
GEN_AI = "gen_ai_server_"  # OpenTelemetry's conventions, as Prometheus writes their names
_MODEL_LABELS = {"": "model_name", GEN_AI: "gen_ai_request_model"}
LAG_EVERY_S = 0.1

# Buckets: seconds of a whole request, seconds between two tokens (a paused request waits for many), seconds of what a
# scheduler does at every step, and tokens.
LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PER_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# What a gauge or a counter reads: one number, or one for each value of its label.
Reading: TypeAlias = float | Mapping[str, float]


class Distribution:
    """A histogram. `bounds`: the upper ends of its buckets, ascending; a last one without end is added."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Family:
    """`name`: without prefix, and for a counter without `_total`. `label`: empty if it has none but the model's.
    `convention`: goes before the name in place of the service's prefix, and the model's label follows it, too."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    label: str
    read: Callable[[], Reading | Distribution]  # an empty mapping: there is nothing to tell now
    convention: str = ""


class Families(Collector):
    """The families of one service. `prefix` is put before every name. `model`: the name of the model that is served;
    every sample has it as its label `model_name`, as vLLM's have, once it is known."""

    def __init__(self, prefix: str = PREFIX, model: Callable[[], str] = str) -> None:
        self.prefix, self._model = prefix, model
        self.families: list[Family] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ---- declaring ----

    def gauge(self, name: str, text: str, read: Callable[[], Reading], label: str = "") -> None:
        self.families.append(Family(name, "gauge", text, label, read))

    def counter(self, name: str, text: str, read: Callable[[], Reading], label: str = "") -> None:
        """One that is kept elsewhere, and read here."""
        self.families.append(Family(name, "counter", text, label, read))

    def counts(self, name: str, text: str, label: str = "") -> Counter[str]:
        """A counter that is kept here: the caller adds to the value of the label, "" if there is no label."""
        kept: Counter[str] = Counter()
        self.counter(name, text, (lambda: kept) if label else (lambda: kept[""]), label)
        return kept

    def histogram(
        self, name: str, text: str, read: Callable[[], Reading | Distribution], *, convention: str = ""
    ) -> None:
        """One that is kept elsewhere, and read here."""
        self.families.append(Family(name, "histogram", text, "", read, convention))

    def distribution(self, name: str, text: str, bounds: tuple[float, ...] = LATENCY_S) -> Distribution:
        """A histogram that is kept here."""
        kept = Distribution(bounds)
        self.histogram(name, text, lambda: kept)
        return kept

    # ---- reading ----

    def collect(self) -> Iterable[Metric]:
        model = self._model()
        for family in self.families:
            own = {_MODEL_LABELS[family.convention]: model} if model else {}
            name = (family.convention or self.prefix) + family.name
            metric = Metric(name, family.text, family.kind)
            reading = family.read()
            if isinstance(reading, Distribution):
                _add_buckets(metric, name, own, reading)
            else:
                name += "_total" if family.kind == "counter" else ""
                values = reading if isinstance(reading, Mapping) else {"": reading}
                for value, number in values.items():
                    labels = {**own, family.label: value} if family.label else own
                    metric.add_sample(name, labels, number)
            yield metric

    def table(self) -> Iterator[tuple[str, str, str, str]]:
        """Name, type, labels and meaning of each family, for the documentation."""
        for family in sorted(self.families, key=lambda family: family.name):
            name = f"{family.convention or self.prefix}{family.name}" + ("_total" if family.kind == "counter" else "")
            yield name, family.kind, family.label, family.text


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


def _add_buckets(metric: Metric, name: str, labels: Mapping[str, str], kept: Distribution) -> None:
    total = 0
    for bound, count in zip((*kept.bounds, float("inf")), kept.counts, strict=True):
        total += count
        metric.add_sample(f"{name}_bucket", {**labels, "le": _bound(bound)}, total)
    metric.add_sample(f"{name}_count", dict(labels), total)
    metric.add_sample(f"{name}_sum", dict(labels), kept.sum)


async def measure_loop_lag(lag: Distribution) -> None:
    """Until cancelled. A timer is late by what other tasks hold the event loop."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lag.observe(max(0.0, loop.time() - due))


def loop_lag(families: Families) -> Distribution:
    """Every service has this family, and feeds it with `measure_loop_lag`."""
    text = f"How late a timer of the event loop fires that is set every {LAG_EVERY_S:g} s"
    return families.distribution("event_loop_lag_seconds", text, PER_TOKEN_S)
