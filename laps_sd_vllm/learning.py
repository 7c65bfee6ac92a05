"""Lessons of finished requests, inside vLLM: asked when a request comes, told when one ends. Fits and files are jobs
for the background. It decides nothing."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock

from laps_sd_vllm.background import FIT, FIT_S, Background, write_whole
from scheduler_service.core.beliefs import Expected, FleetAcceptance, FleetLength
from scheduler_service.learned import Learned, UnreadableLessons, decode
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.predictor.window import EMPTY, UNREADABLE, Row, Snapshot, Window, pack, unpack

SAVE_EVERY_S = 30.0  # if anything was learned since
CLOSE_S = 1.0  # how long the end of the process may wait for the background

Say = Callable[[str], None]


class Learning:
    """`file`: where it is kept; None: nowhere. `online`: whether requests are predicted. `say`: a line for the log.
    `served`: whose answers teach: a model, and behind a slash who drafts for it. `length` and `acceptance`: beliefs
    about all requests, which an ordering shares."""

    def __init__(
        self, background: Background, file: Path | None, online: bool, served: str, draft_len: int, say: Say
    ) -> None:
        self.length, self.acceptance = FleetLength(), FleetAcceptance.at(draft_len)
        self._background, self._file, self._served, self._say = background, file, served, say
        self.predictor = OnlinePredictor() if online else None
        self._others: tuple[Snapshot, Model | None, int] = (EMPTY, None, 0)  # a predictor's, where none is now
        self._finished = self._written = 0  # requests: since the start, and of these in the file
        self._writing = Lock()  # of the file: the background's thread and the end of the process write it
        self._save_at = 0.0
        if file is not None:
            self._restore(file)

    def _restore(self, file: Path) -> None:
        try:
            learned = decode(file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, UnreadableLessons) as error:
            self._say(f"{file} cannot be used, so nothing is known yet: {error}")
            return
        if learned.served.partition("/")[0] not in ("", self._served.partition("/")[0]):  # "": it does not say
            self._say(f"{file} was learned from another model, so nothing is known yet")
            return
        self.length = learned.length
        if learned.served == self._served:
            self.acceptance = learned.acceptance
        else:
            learned = _of_other_drafts(learned)
        if self.predictor is not None:
            self.predictor.restore(learned.examples, learned.model, learned.version)
        else:
            self._others = learned.examples, learned.model, learned.version
        self._say(f"learned from {learned.length.finished} requests earlier: {file}")

    def expect(self, row: Row) -> Expected | None:
        return self.predictor.predict(row) if self.predictor else None

    def finished(self, row: Row | None, emitted: int, drafted: int, accepted: int, *, cut: bool, now: float) -> None:
        """A request ran to its end; `row`: its features."""
        self._finished += 1
        predictor = self.predictor
        if predictor is not None and row is not None:
            predictor.observe(row, emitted, drafted, accepted, cut=cut)
            if predictor.due:
                known = predictor.begin_refit()
                self._background.start("fit", lambda: _fit(self._background, known), process=True)
        if self._file is not None and now >= self._save_at and self._background.start("save", self._saving(self._file)):
            self._save_at = now + SAVE_EVERY_S

    def fitted(self, model: Model | None, error: Exception | None) -> None:
        """The result of a fit."""
        if model is None:
            self._say(f"no model was fitted this time: {error}")
        elif self.predictor is not None:
            cold = not self.predictor.status.warm
            self.predictor.install(model)
            if cold:
                self._say(f"lengths are predicted from now on, learned from {model.trained_on} requests")

    def close(self) -> None:
        """Write what was learned since it was last written: here, since a fit may be under way in the background."""
        if self._file is not None:
            self._last(self._saving(self._file))
        self._background.close(CLOSE_S)

    def leave(self) -> None:
        """The same in the background: nothing is learned any more, but the process goes on."""
        if self._file is not None:
            saving = self._saving(self._file)
            self._background.start("last save", lambda: self._last(saving))

    def _last(self, saving: Callable[[], None]) -> None:
        try:
            saving()
        except OSError as error:
            self._say(f"what was learned is not kept: {error}")

    def _saving(self, file: Path) -> Callable[[], None]:
        """The state as it is now, unless by then the file has it or a later one; what takes long comes later."""
        finished, predictor = self._finished, self.predictor
        known = (predictor.known(), predictor.model, predictor.status.version) if predictor else self._others
        learned = Learned(copy.deepcopy(self.length), copy.copy(self.acceptance), *known, served=self._served)

        def save() -> None:
            with self._writing:
                if finished > self._written:
                    write_whole(file, learned.encode())
                    self._written = finished

        return save


def _of_other_drafts(learned: Learned) -> Learned:
    """`learned` without acceptance: examples count no drafts, and the model tells lengths alone."""
    examples = tuple(each._replace(drafted=0, accepted=0) for each in learned.examples.examples)
    model = learned.model
    if model is not None:
        model = replace(model, tells=model.tells & [True, False])
    return replace(learned, examples=learned.examples._replace(examples=examples), model=model)


def _fit(background: Background, known: Snapshot) -> Model:
    """Raises OSError, subprocess.TimeoutExpired; ValueError where the answer is nonsense."""
    packed = pack(Window.of(known).arrays())
    try:
        return Model.of_arrays(unpack(background.run_framed(FIT, packed, FIT_S)))
    except UNREADABLE as error:
        raise ValueError(f"the answer of a fit cannot be read: {error}") from error
