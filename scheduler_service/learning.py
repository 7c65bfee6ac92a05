"""What the service learns from finished requests. It is asked when a request is submitted, and told when one ends. Its
models are fitted and stored in the background. It decides nothing, and holds up no step."""

import asyncio
import copy

import structlog

from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.logs import trace
from protos.serving import first_of
from scheduler_service.core.beliefs import Expected
from scheduler_service.core.core import Core
from scheduler_service.core.types import Ended, RequestClass
from scheduler_service.learned import Learned, UnreadableLessons, decode
from scheduler_service.predictor import PredictorKind
from scheduler_service.predictor.features import of_prompt
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.predictor.port import Status
from scheduler_service.predictor.window import EMPTY, Row, Snapshot, hashed
from scheduler_service.store import Fenced, Store, StoreUnavailable
from scheduler_service.trainer import Trainer, TrainingFailed

SAVE_EVERY_S = 30.0  # if anything was learned since
MAX_ASKED = 4096  # requests whose features are kept until they end; 2 KB each for a long prompt
LAST_SAVE_S = 3.0  # how long the end of the process may wait for it


class Learning:
    def __init__(self, kind: PredictorKind, core: Core, store: Store, trainer: Trainer | None = None) -> None:
        self._core, self._store = core, store
        self._predictor = OnlinePredictor() if kind is PredictorKind.ONLINE else None
        self._trainer = trainer or Trainer()
        self._asked: dict[str, Row] = {}  # features of the requests submitted last: to reckon them anew costs much
        self._due = asyncio.Event()
        self._epoch = 0
        self._saved = 0  # finished requests that the store knows of
        self._others: tuple[Snapshot, Model | None, int] = (
            EMPTY,
            None,
            0,
        )  # what predictors learned, where this leader has none
        self._served = ""  # fingerprint of the model whose answers taught it; "": not known
        self._log = structlog.get_logger()

    @property
    def status(self) -> Status | None:
        """None without a predictor."""
        return self._predictor.status if self._predictor else None

    async def take_over(self, epoch: int) -> None:
        """Read what earlier leaders have learned. Raises StoreUnavailable."""
        packed = await self._store.learned()
        self._epoch = epoch
        if packed is not None:
            try:
                self._restore(await asyncio.to_thread(decode, packed))
            except UnreadableLessons as error:
                self._log.warning("learned_unreadable", reason=str(error), bytes=len(packed))
        word = self.status.word if self.status else "none"
        self._log.info("learned", predictor=word, finished=self._core.fleet.known.length.finished)

    def _restore(self, learned: Learned) -> None:
        known = self._core.fleet.known
        known.length, known.acceptance, known.probe = learned.length, learned.acceptance, learned.probe
        self._saved, self._served = learned.length.finished, learned.served
        if self._predictor:
            self._predictor.restore(learned.examples, learned.model, learned.version)
        else:
            self._others = learned.examples, learned.model, learned.version

    def serve(self, fingerprint: str) -> bool:
        """Workers run this model. Forget what the answers of another one taught; returns whether there was such a
        one."""
        changed = self._served not in ("", fingerprint)
        self._served = fingerprint
        if changed:
            self._log.info("learned_of_another_model", finished=self._core.fleet.known.length.finished)
            self._core.fleet.forget()
            self._predictor = self._predictor and OnlinePredictor()  # a fit under way goes to the old one
            self._others = EMPTY, None, 0
            self._asked.clear()
            self._saved = 0
        return changed

    # ---- by request ----

    def expect(self, submit: gateway_pb.Submit) -> Expected | None:
        if self._predictor is None:
            return None
        row = self._asked[submit.request_id] = _features(submit)
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        return self._predictor.predict(row)

    def finished(self, submit: gateway_pb.Submit, ended: Ended) -> None:
        """The request ran to its end."""
        if not ended.teaches:
            self._asked.pop(submit.request_id, None)
        elif self._predictor:
            emitted, seen = ended.record.emitted, ended.record.acceptance
            features = self._asked.pop(submit.request_id, None) or _features(submit)
            self._predictor.observe(features, emitted, seen.drafted, seen.accepted, cut=ended.cut)
            if self._predictor.due:
                self._due.set()

    # ---- in the background ----

    async def run(self) -> None:
        """Until cancelled, or Fenced is raised."""
        try:
            await first_of(self._train, self._keep)
        finally:
            await self._trainer.close()

    async def _train(self) -> None:
        """Fit one model at a time. Requests that finish meanwhile count for the next one."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._predictor and self._predictor.due:
                try:
                    await self._refit(self._predictor)
                except Exception as error:  # a mistake of ours: no reason to lead no longer
                    self._log.error("training_failed", reason="internal error", trace=trace(error))
                    await self._trainer.close()  # it may still answer this one

    async def _refit(self, predictor: OnlinePredictor) -> None:
        cold = not predictor.status.warm
        try:
            for _ in predictor.installing(await self._trainer.fit(predictor.begin_refit())):
                await asyncio.sleep(0)
        except TrainingFailed as error:
            self._log.warning("training_failed", reason=str(error), finished=predictor.status.finished)
            return
        tell = self._log.info if cold else self._log.debug
        tell("predictor_fitted", version=predictor.status.version, trained_on=predictor.status.trained_on)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                await self.save()
            except StoreUnavailable as error:
                self._log.warning("learned_not_saved", reason=str(error))
            except Fenced:
                raise
            except Exception as error:  # a mistake of ours: no reason to lead no longer
                self._log.error("learned_not_saved", reason="internal error", trace=trace(error))

    async def save(self) -> None:
        """Raises StoreUnavailable, Fenced. Nothing is written if nothing was learned since."""
        if (finished := self._core.fleet.known.length.finished) == self._saved:
            return
        predictor = self._predictor
        known = (predictor.known(), predictor.model, predictor.status.version) if predictor else self._others
        fleet = self._core.fleet.known
        length, acceptance, probe = copy.deepcopy(fleet.length), copy.copy(fleet.acceptance), copy.deepcopy(fleet.probe)
        learned = Learned(length, acceptance, *known, probe, self._served)
        await self._store.save_learned(self._epoch, await asyncio.to_thread(learned.encode))
        self._saved = finished

    async def close(self) -> None:
        """Save what was learned since it was last saved. Never raises, and takes at most LAST_SAVE_S."""
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self.save()
        except (StoreUnavailable, Fenced, TimeoutError) as error:
            self._log.warning("learned_not_saved", reason=str(error))
        except Exception as error:
            self._log.error("learned_not_saved", reason="internal error", trace=trace(error))


def _features(submit: gateway_pb.Submit) -> Row:
    klass = submit.priority or RequestClass.DEFAULT
    limits = submit.limits
    told = of_prompt(submit.prompt, limits.max_tokens, klass, stop=limits.stop, ignore_eos=limits.ignore_eos)
    return hashed(told)
