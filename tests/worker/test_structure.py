"""Structured output in the engine: every text has its structure, and is the one that the target itself would draw."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from tests.worker.harness import Driver, Tiny
from tests.worker.structures import FEW, KINDS, LIMITS, PROMPT, answer, has, text_of
from tests.worker.test_drafters import make
from worker_service.engine import matcher as matching
from worker_service.engine import structure as module
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.matcher import Mask, Matcher, StructureError
from worker_service.engine.structure import Asked, Structures
from worker_service.engine.types import Finish, Limits, Run, Sampling


def error(driver: Driver) -> str:
    assert driver.finished["r"] is Finish.ERROR
    return driver.rows[-1].error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_ends_by_itself_has_its_structure(tiny: Tiny, kind: str, temperature: float) -> None:
    driver = Driver(tiny.engine())
    for seed in range(8):
        own = Sampling(temperature=temperature, seed=seed, grammar=grammar(KINDS[kind]))
        driver.admit(str(seed), tiny.prompt(PROMPT[seed:]), LIMITS, own)
    driver.finish_all()
    whole = [name for name, finish in driver.finished.items() if finish is Finish.STOP]
    assert all(has(kind, text_of(tiny, driver.outputs[name])) for name in whole)
    assert set(driver.finished.values()) <= {Finish.STOP, Finish.LENGTH}
    assert len(whole) == 8 or kind in ("json_object", "lark")  # a random model may never close these


SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=1)]
EVERY = [replace(own, grammar=grammar(kind)) for own in SAMPLINGS for kind in KINDS.values()]


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny) -> list[list[int]]:
    """The outputs one by one, without drafts."""
    return [answer(tiny, own, drafter=NoDrafter()).outputs["r"] for own in EVERY]


@pytest.mark.parametrize("drafter", ["ngram", "head", "model"])
def test_no_drafter_changes_a_structured_output(
    tiny: Tiny, undisturbed: list[list[int]], drafter: str, tmp_path: Path
) -> None:
    driver = Driver(tiny.engine(drafter=make(drafter, tiny, tmp_path)))
    for i, own in enumerate(EVERY):
        driver.admit(str(i), tiny.prompt(PROMPT), LIMITS, own)
    driver.finish_all(draft_len=lambda n: n % 6)
    assert [driver.outputs[str(i)] for i in range(len(EVERY))] == undisturbed
    assert 0 < sum(row.accepted for row in driver.rows) < sum(row.drafted for row in driver.rows)


@settings(max_examples=4, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_preemption_that_keeps_offloads_or_drops_and_replay_leave_a_structured_output_unchanged(
    tiny: Tiny, undisturbed: list[list[int]], random: Random
) -> None:
    driver = Driver(tiny.engine(blocks=30, host_blocks=15))
    for i, own in enumerate(EVERY):
        driver.admit(str(i), tiny.prompt(PROMPT), LIMITS, own)
    driver.disturb(random, actions=40, slots=6)
    driver.finish_in_little_memory()
    assert [driver.outputs[str(i)] for i in range(len(EVERY))] == undisturbed
    driver.forget_all()


def small_schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.one_of(
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(lambda n: {"type": "integer", "minimum": -n, "maximum": n}, st.integers(0, 300)),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["é", "a b", 3, None]), min_size=1)),
    )
    if not depth:
        return leaf
    inner = small_schemas(depth - 1)
    objects = st.builds(
        lambda properties, optional: {
            "type": "object",
            "properties": properties,
            "required": sorted(set(properties) - set(optional)),
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["id", "name", "ä"]), inner, max_size=3),
        st.lists(st.sampled_from(["id", "name", "ä"])),
    )
    arrays = st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2))
    return st.one_of(leaf, objects, arrays, st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner))


@settings(max_examples=12, deadline=None)
@given(schema=small_schemas(), seed=st.integers(0, 2**64 - 1))
def test_what_small_schemas_give_is_valid(tiny: Tiny, schema: dict[str, Any], seed: int) -> None:
    own = Sampling(temperature=1.0, seed=seed, grammar=grammar(Structure(json_schema=json.dumps(schema))))
    driver = answer(tiny, own, Limits(max_tokens=300))
    assert driver.finished["r"] is Finish.STOP
    validate(json.loads(text_of(tiny, driver.outputs["r"])), schema)


def test_what_a_grammar_forces_is_drafted_and_accepted(tiny: Tiny) -> None:
    """With a drafter that has nothing to offer."""
    driver = answer(tiny, Sampling(grammar=grammar(KINDS["json_schema"])), drafter=NoDrafter())
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert drafted == accepted > len(driver.outputs["r"]) / 2


class Wild(NoDrafter):
    """Drafts the same token again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, asks: Any) -> list[list[int]]:
        return [[self.token] * ask.draft_len for ask in asks]


@pytest.mark.parametrize("which", ["forbidden", "eos"])
def test_drafts_that_cannot_be_accepted_are_not_verified(tiny: Tiny, which: str) -> None:
    token = tiny.eos if which == "eos" else tiny.prompt("z")[0]
    driver = answer(tiny, Sampling(grammar=grammar(Structure(regex="[ab]+"))), drafter=Wild(token))
    assert not sum(row.drafted for row in driver.rows)


def test_an_output_ends_only_where_its_structure_may(tiny: Tiny) -> None:
    eager = Sampling(logit_bias=((tiny.eos, 100.0),), grammar=grammar(Structure(regex="[ab]{4,9}")))
    output = answer(tiny, eager).outputs["r"]
    assert len(text_of(tiny, output)) in (4, 5)  # a last token may be "ab"
    assert output[-1] == tiny.eos


def test_an_output_ends_with_the_token_after_which_nothing_can_follow(tiny: Tiny) -> None:
    driver = answer(tiny, Sampling(grammar=grammar(KINDS["json_schema"])), Limits(max_tokens=60, min_tokens=59))
    assert driver.finished["r"] is Finish.STOP  # the structure is whole: there is no 59th token to come
    assert text_of(tiny, driver.outputs["r"]).endswith("}")
    assert tiny.eos not in driver.outputs["r"]


def test_a_structure_that_may_go_on_goes_on_until_min_tokens(tiny: Tiny) -> None:
    eager = Sampling(logit_bias=((tiny.eos, 100.0),), grammar=grammar(Structure(regex="[ab]+")))
    driver = answer(tiny, eager, Limits(max_tokens=60, min_tokens=12))
    assert len(driver.outputs["r"]) == 13
    assert driver.outputs["r"][-1] == tiny.eos


def test_a_stop_string_ends_a_structured_output(tiny: Tiny) -> None:
    driver = answer(tiny, Sampling(grammar=grammar(KINDS["json_schema"])), Limits(max_tokens=60, stop=('"age"',)))
    assert driver.finished["r"] is Finish.STOP
    assert text_of(tiny, driver.outputs["r"]).endswith('"age":') or text_of(tiny, driver.outputs["r"]).endswith('"age"')


def test_a_bad_grammar_ends_its_request_alone(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("bad", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=grammar(Structure(lark="start: nothing"))))
    driver.admit("good", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=grammar(KINDS["choice"])))
    driver.admit("plain", tiny.prompt(PROMPT), LIMITS)
    driver.finish_all()
    assert driver.finished["bad"] is Finish.ERROR
    assert next(row.error for row in driver.rows if row.error).startswith("structure: ")
    assert has("choice", text_of(tiny, driver.outputs["good"]))
    assert driver.outputs["plain"] == answer(tiny, Sampling()).outputs["r"]


def test_tokens_that_the_grammar_forbids_end_a_request_that_is_rebuilt_with_them(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=grammar(KINDS["choice"])))
    driver.outputs["r"] = tiny.prompt("zzz")
    driver.readmit("r", 3)
    driver.finish_all()
    assert error(driver).startswith("structure: ")


def test_a_tokenizer_that_llguidance_cannot_use_refuses_structures_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> LLTokenizer:
        raise ValueError("what is this?")

    monkeypatch.setattr("llguidance.LLTokenizer", refuse)
    assert answer(tiny, Sampling()).finished["r"] is not Finish.ERROR
    assert "cannot use this model's tokenizer: what is this?" in error(answer(tiny, Sampling(grammar=FEW)))


def test_only_of_a_large_vocabulary_the_tokenizer_is_made_before_anybody_asks(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made while no other thread runs: for seconds, where there are many tokens."""
    made = list[int]()

    def counted(*args: Any, n_vocab: int, **options: Any) -> LLTokenizer:
        made.append(n_vocab)
        raise ValueError("what is this?")

    monkeypatch.setattr("llguidance.LLTokenizer", counted)
    tiny.engine()
    assert made == []
    monkeypatch.setattr(module, "_LARGE", 10)
    driver = Driver(tiny.engine())
    assert len(made) == 1
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=FEW))
    driver.finish_all()
    assert "what is this?" in error(driver)
    assert len(made) == 1


def test_masks_that_fail_end_the_requests_that_wait_for_them(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: object) -> None:
        raise RuntimeError("panicked")

    monkeypatch.setattr(Matcher, "_bits", panic)
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=FEW))
    driver.admit("plain", tiny.prompt(PROMPT), LIMITS)
    driver.finish_all()
    assert driver.finished == {"r": Finish.ERROR, "plain": driver.finished["plain"]}
    assert "panicked" in next(row.error for row in driver.rows if row.error)


CHOICE = grammar(KINDS["choice"])


class PanicError(BaseException):
    """As of native code."""


class Panicking:
    """A matcher of llguidance that panics in one of its methods."""

    def __init__(self, real: LLMatcher, within: str) -> None:
        self.real, self.within = real, within

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self.within:
                raise PanicError(name)
            made = getattr(self.real, name)(*args)
            return Panicking(made, self.within) if isinstance(made, LLMatcher) else made

        return call


@pytest.fixture
def panics(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """All grammars but CHOICE panic within this method from now on."""
    build = module.Structures._build

    def panic(within: str) -> None:
        def built(self: Structures, made: Any, text: str) -> Any:
            matcher = build(self, made, text)
            return matcher if text == CHOICE else Panicking(matcher, within)

        monkeypatch.setattr(module.Structures, "_build", built)

    return panic


@pytest.mark.parametrize("within", ["deep_copy", "unsafe_compute_mask_ptr", "consume_token"])
def test_a_grammar_that_panics_ends_its_request_alone(tiny: Tiny, panics: Callable[[str], None], within: str) -> None:
    expected = answer(tiny, Sampling(grammar=CHOICE)).outputs["r"]
    panics(within)
    driver = Driver(tiny.engine())
    for name, text in {"bad": FEW, "good": CHOICE}.items():
        driver.admit(name, tiny.prompt(PROMPT), LIMITS, Sampling(grammar=text))
    wait(request.matcher._building for request in driver.engine._requests.values() if request.matcher)
    driver.finish_all()
    assert driver.finished["bad"] is Finish.ERROR
    assert within in next(row.error for row in driver.rows if row.error)
    assert driver.outputs["good"] == expected


@pytest.mark.parametrize("within", ["compute_ff_tokens", "try_consume_tokens"])
def test_a_grammar_that_panics_over_drafts_goes_without(tiny: Tiny, panics: Callable[[str], None], within: str) -> None:
    own = Sampling(grammar=grammar(Structure(regex="[ab]{9}")))
    expected = answer(tiny, own).outputs["r"]
    panics(within)
    driver = answer(tiny, own, drafter=Wild(tiny.prompt("z")[0]))
    assert driver.finished["r"] is not Finish.ERROR
    assert driver.outputs["r"] == expected


def test_a_grammar_on_which_llguidance_never_returns_ends_its_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    monkeypatch.setattr(matching, "COMPILE_S", 0.0)
    monkeypatch.setattr(module.Structures, "_build", lambda *args: never.wait())
    assert "was not compiled within" in error(answer(tiny, Sampling(grammar=FEW)))
    monkeypatch.setattr(module, "MASKS_S", 0.0)
    monkeypatch.setattr(Matcher, "masks", lambda *args: never.wait())
    assert "masks of its structure were not made" in error(answer(tiny, Sampling(grammar=FEW)))


def test_masks_that_come_too_late_end_their_request_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    structures: Structures = tiny.engine()._structures
    asked = {name: Asked(structures.matcher(text, []), []) for name, text in {"late": FEW, "good": CHOICE}.items()}
    masks = Matcher.masks

    def slow(self: Matcher, *args: Any) -> Mask:
        if self is asked["late"].matcher:
            never.wait()
        return masks(self, *args)

    monkeypatch.setattr(Matcher, "masks", slow)
    wait(each.matcher._building for each in asked.values())
    making = structures.begin(asked)
    expected = making["good"].masks.result(60)
    monkeypatch.setattr(module, "MASKS_S", 0.0)
    taken = structures.take(making, asked)
    assert "masks of its structure were not made" in str(taken["late"])
    assert taken["good"] is expected
    monkeypatch.undo()
    good = {"good": asked["good"]}
    again = structures.take(structures.begin(good), good)["good"]  # the late ones are being made still
    assert isinstance(again, Mask)
    assert torch.equal(again.bits, expected.bits)


def test_a_grammar_that_takes_too_much_time_for_each_token_ends_its_request_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(tiny, Sampling()).outputs["r"]
    for name in ("MASK_S", "SPARE_S"):
        monkeypatch.setattr(matching, name, 0.0)
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=CHOICE))
    driver.admit("plain", tiny.prompt(PROMPT), LIMITS)
    driver.finish_all()
    assert driver.finished["r"] is Finish.ERROR
    assert "takes too much time for each token" in next(row.error for row in driver.rows if row.error)
    assert driver.outputs["plain"] == expected


def test_a_mask_of_too_many_items_ends_its_request_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASK_ITEMS", 1000)
    driver = Driver(tiny.engine())
    ambiguous = grammar(Structure(lark="start: s\ns: s s | /[a-z ]/"))
    driver.admit("bad", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=ambiguous, logit_bias=((tiny.eos, -100.0),)))
    driver.admit("good", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=CHOICE))
    driver.finish_all()
    assert driver.finished["bad"] is Finish.ERROR
    assert "Too many items (limit 1000" in next(row.error for row in driver.rows if row.error)
    assert has("choice", text_of(tiny, driver.outputs["good"]))


MANY_STATES = grammar(Structure(regex="(.|\n)*[a-m](.|\n){100}"))


def test_what_other_outputs_took_of_a_lexer_ends_no_request(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEXER_STATES", 800)
    sampled = [Sampling(temperature=1.0, seed=seed, grammar=MANY_STATES) for seed in range(6)]
    expected = [answer(tiny, own, Limits(max_tokens=40)).outputs["r"] for own in sampled]
    driver = Driver(tiny.engine())
    for i, own in enumerate(sampled):
        driver.admit(str(i), tiny.prompt(PROMPT), Limits(max_tokens=40), own)
        driver.finish_all()
    assert set(driver.finished.values()) == {Finish.LENGTH}
    assert [driver.outputs[str(i)] for i in range(6)] == expected


def test_an_output_that_needs_more_states_of_a_lexer_than_there_are_ends_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEXER_STATES", 800)
    driver = Driver(tiny.engine())
    for name, tokens in {"long": 400, "short": 4}.items():
        own = Sampling(temperature=1.0, seed=1, grammar=MANY_STATES)
        driver.admit(name, tiny.prompt(PROMPT), Limits(max_tokens=tokens, min_tokens=tokens), own)
        driver.finish_all()
    assert driver.finished == {"long": Finish.ERROR, "short": Finish.LENGTH}
    assert "too many states" in next(row.error for row in driver.rows if row.error)


def test_nobody_waits_while_a_grammar_is_compiled(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    build: Callable[..., LLMatcher] = module.Structures._build

    def slow(*args: Any) -> LLMatcher:
        never.wait()
        return build(*args)

    monkeypatch.setattr(module.Structures, "_build", slow)
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=grammar(KINDS["choice"])))
    driver.admit("plain", tiny.prompt(PROMPT), LIMITS)
    while "plain" not in driver.finished:
        rows = driver.step([Run("r", 4, 64), Run("plain", 4, 64)])
        assert [row.request_id for row in rows] == ["plain"]
    never.set()
    driver.finish_all()
    assert has("choice", text_of(tiny, driver.outputs["r"]))


def test_requests_that_come_together_compile_their_grammar_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    build, begun = module.Structures._build, []

    def slow(*args: Any) -> LLMatcher:
        begun.append(args)
        never.wait()
        return build(*args)

    monkeypatch.setattr(module.Structures, "_build", slow)
    structures = tiny.engine()._structures
    matchers = [structures.matcher(FEW, []) for _ in range(8)]
    never.set()
    for matcher in matchers:
        assert not matcher.copy().is_error()
    assert len(begun) == 1


def test_a_grammar_whose_compilation_failed_is_compiled_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    structures = tiny.engine()._structures
    with monkeypatch.context() as patched:
        patched.setattr(module.Structures, "_build", lambda *args: 1 / 0)
        with pytest.raises(StructureError, match="division"):
            structures.matcher(FEW, []).copy()
    assert not structures.matcher(FEW, []).copy().is_error()


def test_a_grammar_that_is_not_compiled_in_time_ends_its_request_although_others_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    monkeypatch.setattr(matching, "COMPILE_S", 0.0)
    monkeypatch.setattr(module.Structures, "_build", lambda *args: never.wait())
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(PROMPT), LIMITS, Sampling(grammar=FEW))
    driver.admit("plain", tiny.prompt(PROMPT), LIMITS)
    rows = driver.step([Run("r", 4, 64), Run("plain", 4, 64)])
    assert [(row.request_id, row.finish) for row in rows] == [("r", Finish.ERROR), ("plain", None)]


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that comes after the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_matcher_in_an_error_drafts_nothing(tiny: Tiny) -> None:
    matcher: Matcher = tiny.engine()._structures.matcher(grammar(Structure(lark="start: nothing")), [])
    with pytest.raises(StructureError, match="unknown name"):
        matcher.copy()
    assert matcher.forced(4) == matcher.prune([5, 6], 4) == []


def test_an_ngram_drafter_still_helps_where_nothing_is_forced(tiny: Tiny) -> None:
    lists = Structure(regex="(red |green ){30}")
    driver = answer(tiny, Sampling(grammar=grammar(lists)), Limits(max_tokens=200), drafter=NgramDrafter())
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert accepted > drafted / 2 > 20
