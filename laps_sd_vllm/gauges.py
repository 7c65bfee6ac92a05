"""LAPS-SD's figures in vLLM's own /metrics: a stat logger plug-in of vLLM, in the process that serves HTTP. It reads
what the engine processes have written (`status.py`), and decides nothing. Servers without LAPS-SD get
none; but installed beside them it makes vLLM gather statistics despite --disable-log-stats, as any such plug-in does,
unless VLLM_PLUGINS leaves it out."""

import time
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from laps_sd_vllm import status

READ_EVERY_S = 1.0
LABELS = ("model_name", "engine")
FIGURES = {
    "mean_s": (
        "laps_sd_latency_mean_seconds",
        "Mean latency of the last minutes' requests, had this policy ordered them",
    ),
    "p99_s": ("laps_sd_latency_p99_seconds", "Their 99 % latency"),
    "longest_pause_s": ("laps_sd_longest_pause_seconds", "The longest time between two deliveries of one request"),
}
GAUGES = {
    "ordering": "1 while LAPS-SD orders, 0 where it observes or vLLM's own order goes on",
    "compared_requests": "Requests that the figures by policy are about",
    "compared_window_seconds": "From the first arrival of these to the last",
    "finished_requests": "Requests that ran to their end",
}
COUNTERS = {
    "fallbacks": "Falls back to vLLM's own order",
    "plans": "Plans made",
    "planning_seconds": "Seconds in which they were made",
    "late_plans": "Plans that took longer than plan_limit_ms",
    "bad_hints": "Requests with laps_sd_* arguments that are none",
}

logger = init_logger(f"vllm.{__name__}")


def _made(kind: Any, names: dict[str, str]) -> dict[str, Any]:
    more = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
    return {name: kind(f"laps_sd_{name}", told, LABELS, **more) for name, told in names.items()}


class Metrics:
    """All of them, once in a process."""

    one: "Metrics | None" = None

    def __init__(self) -> None:
        self.gauges, self.counters = _made(Gauge, GAUGES), _made(Counter, COUNTERS)
        self.figures = {
            key: Gauge(name, told, (*LABELS, "policy"), multiprocess_mode="mostrecent")
            for key, (name, told) in FIGURES.items()
        }

    @classmethod
    def of_this_process(cls) -> "Metrics":
        if cls.one is None:
            cls.one = cls()
        return cls.one


class Gauges(StatLoggerBase):  # type: ignore[misc]
    """Of one engine process. An error of its own ends the figures, and not the server: vLLM calls it where it hands out
    the answers."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        scheduler = vllm_config.scheduler_config.scheduler_cls
        self._ours = isinstance(scheduler, str) and scheduler.startswith(f"{__package__}.")
        self._config, self._engine = vllm_config, engine_index
        self._counted = dict.fromkeys(COUNTERS, 0.0)
        self._read_at = 0.0

    def record(self, *args: Any, **kwargs: Any) -> None:
        """After each step with output."""
        self.log()

    def log(self) -> None:
        """Every ten seconds, by vLLM."""
        now = time.monotonic()
        if self._ours and now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            try:
                told = status.read(status.find(status.folder(Path(envs.VLLM_CACHE_ROOT)), self._engine))
                if told is not None:
                    self._tell(told)
            except Exception as error:
                self._ours = False
                logger.error("LAPS-SD: /metrics shows its figures no more: %s: %s", type(error).__name__, error)

    def log_engine_initialized(self) -> None:
        pass

    def _tell(self, told: dict[str, Any]) -> None:
        metrics, model = Metrics.of_this_process(), self._config.model_config
        labels = [str(model.served_model_name or model.model), str(self._engine)]
        gauges = {
            "ordering": float(told["mode"] == "order" and not told["fallbacks"]),
            "compared_requests": told["compared"],
            "compared_window_seconds": told["window_s"],
            "finished_requests": told["finished"],
        }
        for name, value in gauges.items():
            metrics.gauges[name].labels(*labels).set(value)
        counters = {name: told["planning_s" if name == "planning_seconds" else name] for name in COUNTERS}
        # Of several processes that serve HTTP, /metrics adds the counters up.
        first = getattr(self._config.parallel_config, "_api_process_rank", 0) <= 0
        for name, value in counters.items():
            metrics.counters[name].labels(*labels).inc(max(0.0, value - self._counted[name]) if first else 0.0)
            self._counted[name] = value
        for policy, figures in told["policies"].items():
            for key, value in figures.items():
                metrics.figures[key].labels(*labels, policy).set(value)
