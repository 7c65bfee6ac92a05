"""What Prometheus sees of the scheduler, beside what Stats answers. Counts nothing but the loop's lag."""

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from protos.tls import Tls
from scheduler_service.leader import Leader

LAG_EVERY_S = 0.05
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_COUNTED = {
    "submitted": "Requests admitted",
    "refused": "Requests refused for lack of room or time",
    "preemptions": "Preemptions",
    "tokens": "Output tokens",
    "drafted": "Drafted tokens",
    "accepted": "Accepted draft tokens",
}


class Metrics(Collector):
    """`leader`: who leads in this process, if anybody. Counters begin anew with each leader, as Prometheus expects of a
    process that starts again."""

    def __init__(self, leader: Callable[[], Leader | None]) -> None:
        self._leader = leader
        self.registry = CollectorRegistry()
        self._lag = Histogram(
            "laps_sd_scheduler_event_loop_lag_seconds",
            f"How late a timer fires that is set every {LAG_EVERY_S:g} s",
            buckets=_LAG_S,
            registry=self.registry,
        )
        self.registry.register(self)

    async def measure_loop_lag(self) -> None:
        """Until cancelled. A timer is late by what other tasks hold the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called in the thread that answers Prometheus, so it reads single numbers alone."""
        leader = self._leader()
        yield GaugeMetricFamily(
            "laps_sd_scheduler_leads", "1 while this process leads", value=float(leader is not None)
        )
        if leader is not None:
            live, behind = len(leader.core.fleet.entries), leader.persister.behind
            yield GaugeMetricFamily("laps_sd_scheduler_live", "Requests that wait, run or are paused", value=live)
            yield GaugeMetricFamily("laps_sd_scheduler_workers", "Attached workers", value=len(leader.sessions))
            yield GaugeMetricFamily("laps_sd_scheduler_unstored", "Batches that wait for the store", value=behind)
            for name, text in _COUNTED.items():
                yield CounterMetricFamily(f"laps_sd_scheduler_{name}", text, value=getattr(leader.counters, name))

    def serve(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Serve /metrics from a thread; returns the bound port. With `tls` only to those who show a certificate of its
        CA. Raises OSError if the port is taken."""
        if tls:
            server, _ = start_http_server(
                port,
                host,
                self.registry,
                certfile=str(tls.cert),
                keyfile=str(tls.key),
                client_cafile=str(tls.ca),
                client_auth_required=True,
            )
        else:
            server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)
