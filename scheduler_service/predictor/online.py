"""The predictor that learns from the service's own finished requests. When and where it is refitted is its shell's."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from scheduler_service.core.beliefs import Expected
from scheduler_service.predictor.model import Calibration, Model
from scheduler_service.predictor.port import Features, Status
from scheduler_service.predictor.window import WINDOW, Example, Row, Snapshot, Window, hashed

TESTED_AT_ONCE = 64  # requests
LEAST_NEW, MOST_NEW = 32, 256  # finished requests between two refits: a tenth of those seen, within these


class OnlinePredictor:
    """Fills the port `Predictor`. A shell with a process for it fits `begin_refit()` there and calls `install`."""

    def __init__(self) -> None:
        self._examples: deque[Example] = deque(maxlen=WINDOW)
        self._finished = 0
        self._refit_at = LEAST_NEW
        self._version = 0
        self._model: Model | None = None
        self._calibration = Calibration(())

    @property
    def status(self) -> Status:
        trained_on = self._model.trained_on if self._model else 0
        return Status(self._model is not None, self._version, self._finished, trained_on)

    @property
    def due(self) -> bool:
        return self._finished >= self._refit_at

    @property
    def model(self) -> Model | None:
        return self._model

    @property
    def surprises(self) -> Sequence[float]:
        """Of the model's last examples, each judged without it."""
        return self._calibration.recent

    def predict(self, features: Features | Row) -> Expected | None:
        if self._model is None:
            return None
        location, scale, acceptance = self._model.raw(hashed(features))
        tells_length, tells_acceptance = self._model.tells
        return Expected(
            self._calibration.length(location, scale) if tells_length else None,
            min(max(0.01, acceptance), 0.99) if tells_acceptance else None,
        )

    def observe(self, features: Features | Row, tokens: int, drafted: int, accepted: int, *, cut: bool = False) -> None:
        """One without output teaches nothing."""
        if tokens < 1:
            return
        example = Example(hashed(features), tokens, drafted, accepted, cut)
        if self._model is not None:  # the model does not know it yet: an honest test
            self._calibration.observe(self._model.surprise(example), cut=cut)
        self._examples.append(example)
        self._finished += 1

    def begin_refit(self) -> Snapshot:
        """What to fit now. It is not due again until enough more has finished."""
        self._refit_at = self._finished + min(MOST_NEW, max(LEAST_NEW, self._finished // 10))
        return self.known()

    def known(self) -> Snapshot:
        return Snapshot(tuple(self._examples), self._finished)

    def install(self, model: Model) -> None:
        """Use it from now on. What finished while it was fitted is its first test."""
        for _ in self.installing(model):
            pass

    def installing(self, model: Model) -> Iterator[None]:
        """As `install`, in steps of TESTED_AT_ONCE requests. The model before is used until the last step is done."""
        calibration, tested = Calibration(model.surprises.tolist()), model.finished
        while newer := min(self._finished - tested, len(self._examples)):
            start = len(self._examples) - newer
            for example in list(islice(self._examples, start, start + TESTED_AT_ONCE)):
                calibration.observe(model.surprise(example), cut=example.cut)
            tested = self._finished - max(newer - TESTED_AT_ONCE, 0)
            yield
        self._model, self._calibration = model, calibration
        self._version += 1

    def refit(self) -> None:
        from scheduler_service.predictor.fit import fit

        self.install(fit(Window.of(self.begin_refit())))

    def restore(self, known: Snapshot, model: Model | None, version: int) -> None:
        """Begin where another process ended."""
        self._examples = deque(known.examples, WINDOW)
        self._finished = known.finished
        self._refit_at = max(LEAST_NEW, self._finished + LEAST_NEW * (model is not None))
        if model is not None:
            self.install(model)
        self._version = version
