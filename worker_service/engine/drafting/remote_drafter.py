"""The drafter that is elsewhere. It is told each text as the target decides it; of what it guesses meanwhile that is
proposed which fits. For guesses that are late a step waits only while that pays. How messages travel is the post's
matter, and so is the time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

from worker_service.engine.drafting.drafter import Ask, Drafter, Verified
from worker_service.engine.drafting.post import Drafts as Drafts
from worker_service.engine.drafting.post import Gone as Gone
from worker_service.engine.drafting.post import News as News
from worker_service.engine.drafting.post import Post as Post
from worker_service.engine.drafting.post import Refused as Refused
from worker_service.engine.drafting.post import Truth as Truth
from worker_service.engine.drafting.post import Welcome as Welcome
from worker_service.engine.drafting.remote import Chain, Chains
from worker_service.engine.drafting.worth import Worth, fan_of
from worker_service.engine.types import Elsewhere

MESSAGE_TOKENS = 8192  # told at once; a longer text goes in pieces
WIDE_TOKENS = 1024  # of a text: of longer ones each further chain takes the drafter longer than it says
_MESSAGE_ROWS = 1024
_MOST_LOSSES = 3  # of one request's text; then it rests
_FIRST_LENGTH = 4  # drafts that a request is taken to want before it has asked
_REST_ROUNDS = 64  # until a request is offered again for which there was no room


@dataclass(slots=True)
class _Request:
    tokens: Sequence[int]
    salt: bytes
    length: int  # of its text, when it was last heard of
    chains: Chains = field(default_factory=Chains)
    draft_len: int = _FIRST_LENGTH
    handle: int = 0  # 0: the drafter does not have it
    told: int = 0  # tokens of its text that were sent under this handle
    told_s: float | None = None  # when; None: a chain has come since
    answered: bool = False  # whether any chain has come under this handle
    losses: int = 0  # how often the drafter has lost it
    resting: float = 0  # rounds for which the drafter is told nothing of it
    proposed: tuple[int, list[int]] = (0, [])  # the length of its text, and what was proposed then

    def leave(self) -> None:
        """Its handle is no more."""
        self.handle, self.told, self.told_s, self.answered, self.losses = 0, 0, None, False, 0


class RemoteDrafter(Drafter):
    """Proposes what has come. Whatever the other side does, the target verifies it."""

    def __init__(self, post: Post, key: bytes) -> None:
        """`key`: for the digests of salts, which are to tell the drafter nothing."""
        self._post, self._key = post, key
        self._worth = Worth()
        self._requests: dict[str, _Request] = {}
        self._pending: dict[str, None] = {}  # those of whom the drafter does not know all, in order
        self._welcome: Welcome | None = None  # None: no drafter is there
        self._handles: dict[int, _Request] = {}
        self._last_handle = 0
        self._over: list[int] = []  # handles that it may forget
        self._pass_begun_s: float | None = None
        self._spare = False  # whether others can run in this step, while the drafts of some are on their way
        self._abreast = 0  # requests that the last step could have had guesses for
        self.drafted = self.accepted = 0  # guesses that were judged, and those of them that were right

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self._read(0.0)
        for ask in asks:
            if ask.local:  # also one of which the drafter knows: its tenant may have forbidden it since
                self.forget(ask.request_id)
        mine = [(ask, self._known(ask)) for ask in asks if not ask.local]
        self._abreast = len(mine)
        self._await(mine, self._post.now())
        drafts: dict[str, list[int]] = {}
        for ask, request in mine:
            request.draft_len = ask.draft_len
            guesses = request.chains.longest(ask.tokens)
            if request.handle:
                self._worth.looked(bool(guesses))
            if guesses:
                guesses = guesses[: self._worth.length(ask.draft_len) or self._worth.probe()]
            request.proposed = len(ask.tokens), guesses
            drafts[ask.request_id] = guesses
        self._pass_begun_s = self._post.now()
        self.apart = [id for id, guesses in drafts.items() if guesses]
        proposed = [drafts.get(ask.request_id, []) for ask in asks]
        self.chances = [[self._worth.right ** (i + 1) for i in range(len(guesses))] for guesses in proposed]
        return proposed

    @property
    def elsewhere(self) -> Elsewhere:  # type: ignore[override]  # as it is now
        delay_s, welcome = self._worth.delay_s or 0.0, self._welcome
        if welcome is None:
            return Elsewhere(0.0, delay_s, self._worth.there, 0)
        supply_s = welcome.step_s + welcome.chain_s * max(self._abreast - 1, 0)
        return Elsewhere(supply_s, delay_s, self._worth.there, welcome.handles)  # the delay has the drafting in it, too

    def late(self, asks: Sequence[Ask]) -> dict[str, bool]:
        self._read(0.0)
        self._spare = bool(asks)
        now_s, late = self._post.now(), dict[str, bool]()
        for ask in asks:
            request = self._requests.get(ask.request_id)
            if request is not None and not ask.local and not request.chains.longest(ask.tokens):
                told_s = request.told_s if request.answered else None
                late[ask.request_id] = told_s is not None and self._worth.soon(now_s - told_s)
        return late

    def expect(self, ask: Ask) -> None:
        if not ask.local:
            self._known(ask)
            self._read(0.0)
            self._tell()

    def verified(self, rounds: Sequence[Verified]) -> None:
        now_s, emitted = self._post.now(), 0
        for id, tokens, _, local in rounds:
            if local:
                self.forget(id)
            if (request := self._requests.get(id)) is None:
                emitted += 1
                continue
            self._judge(request, tokens)
            emitted += len(tokens) - request.length
            request.tokens, request.length = tokens, len(tokens)
            request.resting = max(request.resting - 1, 0)
            self._pending[id] = None
        if self._pass_begun_s is not None and rounds:
            self._worth.passed(now_s - self._pass_begun_s, emitted)
        self._pass_begun_s = None
        self._read(0.0)
        self._tell()
        self._spare = False

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._give_up(request)

    def _give_up(self, request: _Request) -> None:
        """Its handle is over, if it has one."""
        if self._handles.pop(request.handle, None) and request.told:
            self._over.append(request.handle)
        request.leave()

    def _known(self, ask: Ask) -> _Request:
        if (request := self._requests.get(ask.request_id)) is None:
            salt = blake2b(ask.salt.encode(), digest_size=16, key=self._key).digest()
            request = self._requests[ask.request_id] = _Request(ask.tokens, salt, len(ask.tokens))
            self._pending[ask.request_id] = None
        return request

    def _judge(self, request: _Request, tokens: Sequence[int]) -> None:
        """What the target made of the guesses that were proposed."""
        (at, guesses), request.proposed = request.proposed, (0, [])
        pairs = list(zip(guesses, tokens[at:], strict=False))  # of those that were not verified one at most is judged
        right = next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        self._worth.judged(right, len(pairs))
        self.drafted += len(pairs)
        self.accepted += right

    def _await(self, mine: Sequence[tuple[Ask, _Request]], begun_s: float) -> None:
        """Wait for chains that are late, while that pays."""

        def there() -> int:
            return sum(len(request.chains.longest(ask.tokens)) for ask, request in mine)

        now_s, limit_s, before, self.waited_s = begun_s, begun_s + self._worth.patience_s, -1, 0.0
        while now_s < limit_s:
            late = []
            for ask, request in mine:
                if request.told_s is not None and request.answered:
                    most = self._worth.length(ask.draft_len)
                    lacking = self._worth.gain(most) - self._worth.gain(len(request.chains.longest(ask.tokens)[:most]))
                    late.append((now_s - request.told_s, lacking))
            if not self._worth.pays(late, limit_s - now_s):
                break
            before = there() if before < 0 else before
            self._read(limit_s - now_s)
            now_s = self._post.now()
        if before >= 0:
            self.waited_s = now_s - begun_s
            self._worth.waited(there() > before)

    # ---- the drafter, as far as it is known ----

    def _tell(self) -> None:
        """Send what the drafter does not know yet, in one message unless it is long. What finds no room goes later."""
        while (welcome := self._welcome) is not None and (self._pending or self._over):
            most = min(_MESSAGE_ROWS, welcome.handles)
            over, room, news = self._over[:most], MESSAGE_TOKENS, dict[str, Truth]()
            for id in list(self._pending):
                if room <= 0 or len(over) + len(news) == most:
                    break
                if (row := self._row(self._requests[id], welcome, room, len(over))) is None:
                    del self._pending[id]  # until its next round
                else:
                    news[id] = row
                    room -= len(row.tokens)
            rows = [*(Truth(handle, forget=True) for handle in over), *news.values()]
            if not rows or not self._post.send(rows):
                return
            del self._over[: len(over)]
            for id, row in news.items():
                self._told(id, row)

    def _row(self, request: _Request, welcome: Welcome, room: int, leaving: int) -> Truth | None:
        """At most `room` tokens of its text, in a message that ends so many handles. None: there is nothing to tell, or
        it may not be told."""
        tokens = request.tokens[request.told : request.told + room]
        if len(request.tokens) > welcome.context_tokens or max(tokens, default=0) >= welcome.vocab_size:
            self._give_up(request)
            request.resting = inf
        taken = len(self._handles) + len(self._over) - leaving
        full = not request.handle and taken >= welcome.handles
        if request.resting or full or not tokens:
            return None
        if not request.handle:
            self._last_handle = request.handle = self._last_handle + 1
            self._handles[request.handle] = request
        need = ahead = fan = 0  # of a part of a text nothing is guessed
        if request.told + len(tokens) == len(request.tokens):
            need = min(self._worth.length(request.draft_len) or 1, welcome.longest_chain)
            ahead = need
            if not (self._spare and self._worth.soon(0.0)):  # else another one runs until drafts of the truth are here
                ahead, fan = min(2 * need + 1, welcome.longest_chain), self._fan(welcome, need, request.length)
        salt = b"" if request.told else request.salt
        depth = min(need + 1, welcome.longest_chain) if fan else 0  # the outcome, and what is of use after it
        return Truth(request.handle, request.told, tokens, need, ahead, fan, depth, salt)

    def _fan(self, welcome: Welcome, need: int, length: int) -> int:
        """How many guesses at each position where the pass may end, so that what follows is there whatever it decides.
        0: the main chain alone. `length`: of the text."""
        most = min(welcome.widest_fan, 2 if length > WIDE_TOKENS else 4)
        fan = min(fan_of(welcome.step_s, welcome.chain_s, max(self._abreast, 1), need), most)
        return fan if fan > 1 else 0

    def _told(self, id: str, row: Truth) -> None:
        request = self._requests[id]
        request.told = row.start + len(row.tokens)
        if request.told == len(request.tokens):
            request.told_s = self._post.now()
            del self._pending[id]

    def _read(self, wait_s: float) -> None:
        """Take in what has come, or comes first within `wait_s` seconds."""
        for news in self._post.receive(wait_s):
            if isinstance(news, Drafts):
                for handle, chain in news.chains:
                    self._take(handle, chain, news.arrived_s)
                for refused in news.refused:
                    self._refuse(refused)
            else:
                self._welcome = news if isinstance(news, Welcome) else None
                self._handles, self._last_handle, self._over = {}, 0, []
                for request in self._requests.values():
                    request.leave()
                    request.resting = 0
                self._pending = dict.fromkeys(self._requests)

    def _take(self, handle: int, chain: Chain, arrived_s: float) -> None:
        if (request := self._handles.get(handle)) is None:
            return  # it has ended meanwhile
        request.chains.add(chain)
        if request.told_s is not None and request.chains.follows(chain, request.tokens, request.told):
            if request.answered:  # the first one took the time to read the whole text
                self._worth.arrived(max(arrived_s - request.told_s, 0.0))
            request.told_s, request.answered = None, True

    def _refuse(self, refused: Refused) -> None:
        if (request := self._handles.get(refused.handle)) is None:
            return
        if refused.send_from is not None and request.losses < _MOST_LOSSES:
            request.told = min(request.told, refused.send_from)
            request.losses += 1
        else:
            self._give_up(request)
            request.resting = _REST_ROUNDS
        self._pending |= {id: None for id, known in self._requests.items() if known is request}
