"""What gateways may ask of the leader: to run a request, to follow it, to cancel it. No transport lives here."""

from collections.abc import Mapping
from functools import partial

from protos.errors import BadInput, DeadlinePassed, DuplicateRequest, NotServing, QueueFull, RequestError
from protos.idempotence import same
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.watched import Watched
from scheduler_service import checks
from scheduler_service.config import Settings
from scheduler_service.core import backlog
from scheduler_service.core.events import Cancelled
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import QueueIsFull, TooLarge, TooLate, Unseen
from scheduler_service.counters import Counters
from scheduler_service.durable_core import DurableCore
from scheduler_service.event_log import EventLog
from scheduler_service.ledger import Ledger
from scheduler_service.outbox import GatewayOutbox, Outboxes
from scheduler_service.persister import Persister
from scheduler_service.recovery import Recovery
from scheduler_service.retries import Retries
from scheduler_service.tenants import read_terms
from scheduler_service.tracked import Tracked
from scheduler_service.worker_pool import WorkerPool

MAX_BEHIND = 1024  # while so many submissions and endings wait for the store, nothing more is admitted
MAX_LINES = 1024  # of tenants that were refused for their own requests


class Requests:
    def __init__(
        self,
        settings: Settings,
        durable: DurableCore,
        workers: WorkerPool,
        *,
        ledger: Ledger,
        persister: Persister,
        recovery: Recovery,
        counters: Counters,
        outboxes: Outboxes,
        event_log: EventLog | None,
    ) -> None:
        self._durable, self._core, self._workers = durable, durable.core, workers
        self._ledger, self._persister, self._recovery = ledger, persister, recovery
        self._counters, self._outboxes, self._event_log = counters, outboxes, event_log
        self._cancelled: set[str] = set()  # requests that are to end, and that recovery is still to read
        self._retries = Retries()
        self._own_lines: dict[str, Retries] = {}  # by tenant; the one that was refused last is the last
        file = settings.tenants
        self._terms: Watched[Mapping[str, Terms]] | None = Watched([file], partial(read_terms, file)) if file else None

    def link(self, outbox: GatewayOutbox) -> None:
        """A gateway has come."""
        self._outboxes.link(outbox)

    def unlink(self, outbox: GatewayOutbox) -> None:
        """A gateway was lost. Its requests go on, and a gateway may follow them again by offset."""
        self._outboxes.discard(outbox)
        self._ledger.leave(outbox)

    async def submit(self, submit: pb.Submit, outbox: GatewayOutbox) -> None:
        """Run a request, or refuse it. If the same request (id and content) is live, follow that one. Raises
        StoreUnavailable."""
        id = submit.request_id
        await self._recovery.fetch([id])
        if (known := self._ledger.live.get(id)) is not None and same(known.submit, submit):
            if known.stored:
                outbox.accepted(id)
                await self._ledger.follow(id, 0, outbox)
            else:  # at once: when its first write is durable, those that have joined are told
                self._ledger.join(id, outbox)
            return
        try:
            model = self._check(submit, known)
            self._durable.submit(submit, model.fingerprint, outbox)
        except QueueIsFull as error:
            line = self._own_line(submit.tenant) if error.of_tenant else self._retries
            after_ms = line.after_ms(self._durable.clock(), error.room_s, backlog.request_s(self._core.fleet))
            self._refuse(submit, outbox, QueueFull(str(error), retry_after_ms=after_ms))
        except TooLarge as error:
            self._refuse(submit, outbox, BadInput("max_tokens", f"prompt and output may come to {error}"))
        except TooLate as error:
            self._refuse(submit, outbox, DeadlinePassed(str(error)))
        except RequestError as error:
            self._counters.refused_for[error.reason.lower()] += 1
            outbox.refuse(id, error)
        else:
            self._workers.call_for(id)

    def _check(self, submit: pb.Submit, known: Tracked | None) -> common_pb.ModelInfo:
        """The model that runs it. Raises RequestError if the request cannot be run, however much room there is."""
        if known is not None:
            raise DuplicateRequest(f"request_id: {submit.request_id} is taken by another request")
        if (model := self._workers.served) is None:
            raise NotServing("no warmed worker", retry_after_ms=1000)
        if self._persister.refusal:
            raise NotServing(f"the store refuses: {self._persister.refusal}", retry_after_ms=1000)
        if submit.model_fingerprint not in ("", model.fingerprint):  # tokens of another tokenizer
            raise NotServing("the model has changed since the request was sent", retry_after_ms=1000)
        if self._persister.behind_without_reports >= MAX_BEHIND:
            raise NotServing("the store is behind", retry_after_ms=1000)
        checks.submit(submit, model.context_tokens)
        self.count_unread()
        self.reload_tenant_terms()
        return model

    def count_unread(self) -> None:
        """Have the core reckon with requests that an earlier leader left and nobody has read yet: their number may have
        changed."""
        unread, model = len(self._recovery.unread), self._workers.model
        self._core.fleet.unseen = Unseen(unread, unread * model.context_tokens) if model else Unseen(unread)

    def _refuse(self, submit: pb.Submit, outbox: GatewayOutbox, error: RequestError) -> None:
        """For lack of room or time."""
        self._counters.refuse(submit.tenant)
        self._counters.refused_for[error.reason.lower()] += 1
        outbox.refuse(submit.request_id, error)

    def _own_line(self, tenant: str) -> Retries:
        """Whom its own requests keep out takes no room of others."""
        line = self._own_lines[tenant] = self._own_lines.pop(tenant, Retries())
        if len(self._own_lines) > MAX_LINES:
            del self._own_lines[next(iter(self._own_lines))]
        return line

    def reload_tenant_terms(self) -> None:
        """If the settings' file has changed."""
        if self._terms is not None and (terms := self._terms.get()) is not self._core.fleet.tenants.terms:
            self._core.fleet.tenants.terms = terms
            if self._event_log:
                self._event_log.terms(terms)

    def needs_store(self, asked: pb.Submit | pb.Follow) -> bool:
        """Whether the store has to be asked first."""
        unread = asked.request_id in self._recovery.unread
        if isinstance(asked, pb.Submit):
            return unread
        return not unread and self._ledger.known(asked.request_id) is None

    async def follow(self, follow: pb.Follow, outbox: GatewayOutbox) -> None:
        """Send all durable output from the offset on, then what comes. Raises StoreUnavailable."""
        if follow.request_id in self._recovery.unread:
            self._ledger.follow_later(follow.request_id, follow.offset, outbox, follow.most_tokens)
        else:
            await self._ledger.follow(follow.request_id, follow.offset, outbox, follow.most_tokens)

    async def submission(self, id: str) -> pb.Submit:
        """What was submitted under this id, without its deadline. Raises UnknownRequest, StoreUnavailable."""
        await self._recovery.fetch([id])
        return await self._ledger.submission(id)

    def cancel(self, id: str) -> None:
        """End a live request: at once, or as soon as it was read."""
        if id in self._recovery.unread:
            self._cancelled.add(id)
        else:
            self._durable.apply(Cancelled(id))

    def was_read(self, id: str) -> None:
        """Recovery has read this request."""
        if id in self._cancelled:
            self._cancelled.remove(id)
            self._durable.apply(Cancelled(id))
