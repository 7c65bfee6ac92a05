"""Starts the scheduler service: waits until it may lead if it is one of a pair, takes over the queue in Redis, then
serves workers and gateways until SIGTERM."""

import asyncio
import faulthandler
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_delay,
    wait_exponential,
)

from protos import garbage, tracing
from protos.errors import NotServing
from protos.former import FormerLinks
from protos.link.v1 import gateway_link_pb2_grpc, worker_link_pb2_grpc
from protos.logs import configure_logs
from protos.observed import observed
from protos.outage import Outage
from protos.serving import LINK_MESSAGE_BYTES, Server, first_of, stop_signals
from protos.settings import read
from protos.tls import PeerNames
from protos.tracing import Tracing
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.links.gateways import GatewayLink
from scheduler_service.links.workers import WorkerLink
from scheduler_service.metrics import Metrics
from scheduler_service.standby import HigherEpoch, wait_to_lead
from scheduler_service.store import Fenced, Pulse, RedisStore, Store, StoreUnavailable, WrongType

SERVICES = ("laps_sd.link.v1.WorkerLink", "laps_sd.link.v1.GatewayLink")
TAKE_OVER_TIMEOUT_S = 30.0
STOP_GRACE_S = 1.0
READY_CHECK_S = 1.0


class LeaderSlot:
    """The leader in this process, if it leads: one after the other, all behind the same port."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing`: where each of them sends its spans; None: nowhere."""
        self.leader: Leader | None = None
        self.tracing = tracing

    def __call__(self) -> Leader:
        if self.leader is None:
            raise NotServing("this scheduler stands by")
        return self.leader

    def is_ready(self) -> bool:
        """Whether requests can be stored here. A scheduler that stands by is not ready."""
        return self.leader is not None and not self.leader.persister.refusal

    def is_idle(self) -> bool:
        """Whether no request is live here."""
        return self.leader is None or not self.leader.core.fleet.entries


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises StoreUnavailable, OSError; Fenced if another took over and we are no standby."""
    store = RedisStore(
        settings.redis_url,
        namespace=settings.namespace,
        keep_s=settings.keep_s,
        replicas=settings.redis_replicas,
        options=settings.redis_options(),
    )
    slot = LeaderSlot(tracing.make("scheduler", settings.otlp_endpoint, settings.trace_ratio))
    server = make_server(settings)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(slot), server.grpc)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLink(slot), server.grpc)
    server.grpc.add_generic_rpc_handlers((FormerLinks(),))
    async with stop_signals() as stopping:
        port = await server.start(settings.host, settings.port)
        await server.start_health(settings.health_host, settings.health_port)
        structlog.get_logger().info("listening", host=settings.host, port=port, standby=settings.standby)
        tasks: list[Callable[[], Awaitable[object]]] = [
            stopping.wait,
            lambda: hold(settings, store, server, slot),
            lambda: garbage.search(slot.is_idle),
        ]
        metrics = Metrics(lambda: slot.leader, settings.metrics_prefix)
        try:
            async with observed(settings, settings.metrics_port, metrics, metrics.lag, slot.is_ready):
                await first_of(*tasks)
        finally:
            await retire(server, slot)
            await server.stop(STOP_GRACE_S)
            await store.close()
            if slot.tracing is not None:
                slot.tracing.close()


async def hold(settings: Settings, store: Store, server: Server, slot: LeaderSlot) -> None:
    """Lead, until cancelled. As a standby wait for that first, and again whenever another scheduler has taken over."""
    seen, least_epoch, epoch = None, 0, 0
    while True:
        if settings.standby:
            seen = await wait_to_lead(store, settings.lease_s)
        leader = Leader(settings, store, tracing=slot.tracing)
        leader.epoch = epoch  # that we led under last: what its pulse has become since is our own doing
        try:
            await take_over(leader, seen, least_epoch)
            slot.leader = leader
            await first_of(leader.run, partial(keep_ready, server, leader))
        except Fenced as fenced:
            if not settings.standby:
                raise
            structlog.get_logger().warning("stepped_down", reason=str(fenced))
            slot.leader = leader  # which may have come too late to lead: it too has a log to close
            await retire(server, slot)
        except HigherEpoch as higher:
            structlog.get_logger().warning("higher_epoch_obeyed", epoch=leader.epoch, by=higher.epoch)
            await retire(server, slot)
            # Lead again, above that epoch. If its leader lives `lead` fails: the pulse is no longer the one we left.
            seen, least_epoch, epoch = Pulse(leader.epoch, None), higher.epoch + 1, leader.epoch


async def keep_ready(server: Server, leader: Leader) -> None:
    """The service is ready, and its gateways are, except while the store refuses its commits for a reason that waiting
    does not mend."""
    while True:
        refuses = bool(leader.persister.refusal)
        leader.outboxes.refuses(refuses)
        await server.set_ready(not refuses)
        await asyncio.sleep(READY_CHECK_S)


async def retire(server: Server, slot: LeaderSlot) -> None:
    """The leader in this process leads no longer."""
    leader, slot.leader = slot.leader, None
    await server.set_ready(False)
    if leader is not None:
        leader.sessions.send_away()  # workers whose links end with their leader have not crashed
        await leader.close()


async def take_over(leader: Leader, seen: Pulse | None, least_epoch: int = 0) -> None:
    outage = Outage()

    def tell(attempt: RetryCallState) -> None:
        error = str(attempt.outcome.exception() if attempt.outcome else "")
        if outage.is_new(error):
            structlog.get_logger().warning("store_unavailable", error=error)

    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable) & retry_if_not_exception_type(WrongType),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(TAKE_OVER_TIMEOUT_S),
        before_sleep=tell,
        reraise=True,
    ):
        with attempt:
            await leader.lead(seen, least_epoch)


def make_server(settings: Settings) -> Server:
    """Under TLS it takes certificates of the CA alone, and each service only the names that may call it."""
    names = dict(zip(SERVICES, (settings.worker_names, settings.gateway_names), strict=True))
    return Server(
        SERVICES,
        LINK_MESSAGE_BYTES,
        settings.tls.server_credentials(),
        interceptors=[PeerNames(names)] if settings.tls else [],
        reflect=settings.reflection,
    )


def main() -> int:
    faulthandler.enable()  # where a library crashes the process, its stacks are told
    settings = read(Settings, "scheduler")
    log = configure_logs("scheduler", settings.log_level)
    started = time.monotonic()
    if settings.redis_in_the_clear:
        log.warning("redis_in_the_clear", advice="use rediss:// for a Redis on another machine")
    try:
        asyncio.run(serve(settings))
    except (StoreUnavailable, Fenced, OSError) as error:
        log.error("stopped", reason=str(error), after_s=round(time.monotonic() - started, 1))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
