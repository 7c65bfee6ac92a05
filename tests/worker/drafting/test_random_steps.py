"""Requests that come, pause, move and go in any order, on both ends of drafting apart, while its drafter dies now and
then: on a clock of the test's own."""

from random import Random

from tests.worker.drafting.knowing import Known
from tests.worker.drafting.virtual import DRAFT_LEN, HIDDEN, VOCABULARY, Way
from worker_service.engine.drafting.drafter import Ask, Verified
from worker_service.engine.drafting.remote_drafter import RemoteDrafter

STEPS = 5000
TOKENS, LIVE = 40, 6


def test_after_5000_random_steps_the_guesses_were_good_ones_and_the_drafter_holds_nothing() -> None:
    random = Random(5)
    texts = {str(number): [number, *random.choices(range(VOCABULARY), k=TOKENS)] for number in range(LIVE)}
    pairs = [(whole[:1], whole[1:]) for whole in texts.values()]
    way = Way(Known("", supply_ms=20.0, chain_ms=1.0, rtt_ms=10.0, vocab_size=VOCABULARY, pairs=pairs))
    drafter, asks = RemoteDrafter(way, b"key"), dict[str, Ask]()
    for _ in range(STEPS):
        name, whole = random.choice(list(texts.items()))
        match random.choices(["run", "come", "move", "die"], [60, 20, 5, 1])[0]:
            case "come" if name not in asks:
                asks[name] = Ask(name, whole[: random.randrange(1, 5)], DRAFT_LEN, random.choice(["a", "b"]))
                drafter.expect(asks[name])
            case "move" if name in asks:  # what was not durable is lost
                drafter.forget(name)
                asks[name] = asks[name]._replace(tokens=whole[: random.randrange(1, len(asks[name].tokens) + 1)])
                drafter.expect(asks[name])
            case "die":
                way.restart()
            case _:  # the others are preempted
                running = random.sample(list(asks.values()), random.randrange(len(asks) + 1))
                step(way, drafter, asks, running, texts, random)
    assert drafter.accepted > 0.5 * drafter.drafted > STEPS / 4
    for name in list(asks):
        drafter.forget(name)
    drafter.verified([])
    way.settle()
    assert way.empty


def step(
    way: Way,
    drafter: RemoteDrafter,
    asks: dict[str, Ask],
    running: list[Ask],
    texts: dict[str, list[int]],
    random: Random,
) -> None:
    """A pass of some length; a request whose text is whole goes."""
    drafter.late(running)
    drafts, verified = drafter.propose(running), []
    way.time_s += random.choice([0.005, 0.03, 0.1])
    for (name, tokens, *_), guesses in zip(running, drafts, strict=True):
        text, whole = list(tokens), texts[name]
        for guess in [*guesses, None]:
            text.append(whole[len(text)])
            if len(text) == len(whole) or text[-1] != guess:
                break
        if len(text) == len(whole):
            drafter.forget(name)
            del asks[name]
        else:
            asks[name] = asks[name]._replace(tokens=text)
            verified.append(Verified(name, text, HIDDEN))
    drafter.verified(verified)
