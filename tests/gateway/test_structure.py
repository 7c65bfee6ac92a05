"""Structures are compiled before anything is submitted: each refusal is an INVALID_ARGUMENT that names the field."""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from llguidance import LLTokenizer

from gateway import grammars, validate
from gateway import structure as module
from gateway.structure import Structures
from gateway.text import TextModel
from protos.errors import BadInput, NotServing
from protos.idempotence import same
from protos.link.v1.gateway_link_pb2 import Submit
from protos.models import unpacked
from protos.structure import grammar
from protos.v1 import inference_pb2
from protos.v1.types_pb2 import Choice, Structure
from tests.gateway.harness import model_info
from worker_service.engine import structure as in_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = TextModel(model_info())
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
DEEP = '{"items":' * 5000 + "{}" + "}" * 5000
BOMB = json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})
BAD = [
    (Structure(), "structure: give one of json_schema, json_object, regex, choice and lark"),
    (Structure(json_schema=""), "structure.json_schema: must not be empty"),
    (Structure(json_schema="{"), "structure.json_schema: EOF while parsing"),
    (Structure(json_schema="[]"), "structure.json_schema: Expecting object schema"),
    (Structure(json_schema='{"type": "text"}'), "structure.json_schema: Invalid type: text"),
    (Structure(json_schema='{"not": {}}'), "structure.json_schema: Unimplemented keys"),
    (
        Structure(json_schema='{"$ref": "http://example.com/a"}'),
        "structure.json_schema: Resource 'http://example.com/a'",
    ),
    (Structure(json_schema=DEEP), "structure.json_schema: recursion limit exceeded"),
    (Structure(json_schema=BOMB), "structure.json_schema: no text can have this structure"),
    (Structure(json_schema=" " * 70_000), "structure.json_schema: 70004 bytes; at most 65536"),
    (Structure(json_object=False), "structure.json_object: must be true"),
    (Structure(regex=""), "structure.regex: must not be empty"),
    (Structure(regex="a("), 'structure.regex: invalid regex: unclosed group, in "a("'),
    (Structure(regex="(?=a)b"), "structure.regex: invalid regex: look-around, including"),
    (Structure(regex=r"(a)\1"), "structure.regex: invalid regex: "),
    (Structure(regex=r"[^\s\S]"), "structure.regex: no text can have this structure"),
    (Structure(choice=Choice()), "structure.choice: must have at least one text"),
    (Structure(choice=Choice(texts=["a", ""])), "structure.choice: must have at least one text"),
    (Structure(choice=Choice(texts=["a"] * 1001)), "structure.choice: 1001 texts; at most 1000"),
    (Structure(choice=Choice(texts=["a" * 70_000])), "structure.choice: 70008 bytes; at most 65536"),
    (Structure(lark=""), "structure.lark: must not be empty"),
    (Structure(lark="start: nothing"), 'structure.lark: at 1(8): unknown name: "nothing"'),
    (Structure(lark="%%%"), "structure.lark: 1(2): lexer error"),
    (Structure(lark="start: <|nothing|>"), "structure.lark: at 1(8): unknown special token"),
    (Structure(lark="start: start"), "structure.lark: no text can have this structure"),
]
NESTED: dict[str, object] = {"type": "string"}
for _ in range(40):
    NESTED = {"type": "object", "properties": {"inner": NESTED}, "required": ["inner"]}
GOOD = [
    Structure(json_schema=json.dumps(NESTED)),
    Structure(json_schema=SCHEMA),
    Structure(json_object=True),
    Structure(regex="[a-z]+é"),
    Structure(choice=Choice(texts=["yes", 'a "quote"\n\\', "é😀"])),
    Structure(lark='start: "(" start ")" | "x"'),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def structures() -> AsyncIterator[Structures]:
    checked = Structures()
    yield checked
    await checked.close()


async def check(structures: Structures, structure: Structure, model: TextModel = MODEL) -> None:
    await structures.check(structure, model, "t")


@pytest.mark.parametrize(("structure", "message"), BAD, ids=[message[10:60] for _, message in BAD])
async def test_a_bad_structure_is_refused(structures: Structures, structure: Structure, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        await check(structures, structure)
    assert refusal.value.message.startswith(message)
    assert refusal.value.field == message.partition(":")[0]


@pytest.mark.parametrize("structure", GOOD, ids=lambda structure: str(structure)[:20])
async def test_a_good_structure_is_taken(structures: Structures, structure: Structure) -> None:
    await check(structures, structure)


HARD = {  # what they would take of the gateway if it compiled them itself
    "memory and time": Structure(json_schema='{"type": "integer", "multipleOf": 1234567}'),
    "its stack": Structure(
        lark="start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "x"' for i in range(3000)) + '\nr3000: "y"'
    ),
}


@pytest.mark.parametrize("cost", HARD)
async def test_a_grammar_that_would_take_the_gateway_down_is_refused_once_and_for_all(
    structures: Structures, cost: str
) -> None:
    for _ in range(2):
        with pytest.raises(BadInput, match="takes too much time or memory"):
            await check(structures, HARD[cost])
    await check(structures, GOOD[0])  # by another compiler


OUT_OF_STEP = """
import json, sys
print("some library says hello", flush=True)
for line in sys.stdin:
    print(json.dumps("bad regex" if "BAD" in line else ""), flush=True)
"""


async def test_a_compiler_that_says_something_else_gives_no_grammar_the_verdict_of_another() -> None:
    structures = Structures((sys.executable, "-c", OUT_OF_STEP))
    for regex in ("good", "BAD", "good too"):
        with pytest.raises(ValueError, match="Expecting value"):
            await check(structures, Structure(regex=regex))
    await structures.close()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    text = unpacked(MODEL.tokenizer_json)
    return LLTokenizer(text, n_vocab=MODEL.vocab_size, eos_token=list(MODEL.eos_ids))


@pytest.mark.parametrize(
    ("bound", "least", "message"),
    [
        ("MASK_ITEMS", 1, "Too many items"),
        ("LEXER_STATES", 1, "too many states"),
        ("MASK_S", 0, "too much time for each token"),
    ],
)
async def test_a_grammar_whose_masks_take_too_much_is_refused(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch, bound: str, least: int, message: str
) -> None:
    text = grammar(Structure(lark='start: s\ns: s s | "a" | "b"'))
    assert not grammars.problem(tokenizer, text)
    monkeypatch.setattr(grammars, bound, least)
    assert message in grammars.problem(tokenizer, text)


async def test_gateway_and_worker_have_the_same_limits() -> None:
    ours, theirs = ((each.MASK_ITEMS, each.LEXER_STATES) for each in (grammars, in_worker))
    assert ours == theirs


async def test_the_same_structure_is_compiled_once(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = Structures._ask

    async def counted(self: Structures, form: str, model: TextModel) -> str:
        asked.append(form)
        return await ask(self, form, model)

    monkeypatch.setattr(Structures, "_ask", counted)
    own = Structure(regex="only here")
    await asyncio.gather(*(check(structures, own) for _ in range(5)))
    await check(structures, own)
    assert len(asked) == 1


async def test_a_tenants_grammars_do_not_go_before_anothers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begin = [], asyncio.Event()

    async def compiled(self: Structures, form: str, model: TextModel) -> str:
        async with self._one_at_a_time:
            asked.append(form)
            await begin.wait()
        return ""

    monkeypatch.setattr(Structures, "_ask", compiled)
    structures = Structures()
    checks = [
        asyncio.create_task(structures.check(Structure(regex=regex), MODEL, tenant))
        for regex, tenant in [("one", "many"), ("two", "many"), ("two", "many"), ("three", "many"), ("other", "few")]
    ]
    await asyncio.wait(checks, timeout=0)
    begin.set()
    await asyncio.gather(*checks)
    order = [next(name for name in ("one", "two", "three", "other") if name in form) for form in asked]
    assert order == ["one", "other", "two", "three"]  # and each once
    await structures.close()


async def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    structures = Structures()
    for i in range(4):
        await check(structures, Structure(regex=f"number {i}"))
    assert len(structures._verdicts) == 2
    await structures.close()


async def test_a_client_that_hangs_up_spoils_no_answer_to_another() -> None:
    structures = Structures()
    first = asyncio.create_task(check(structures, GOOD[0]))
    await asyncio.wait([first], timeout=0)
    first.cancel()
    assert structures._waiting["t"].locked()  # until the compiler has answered
    with pytest.raises(BadInput, match="unknown name"):
        await check(structures, Structure(lark="start: nothing"))
    await check(structures, GOOD[0])
    assert not any(place.locked() for place in structures._waiting.values())
    await structures.close()


SILENT = (sys.executable, "-c", "import sys; print('\"\"', flush=True); sys.stdin.read()")
GONE = (sys.executable, "-c", "")


@pytest.mark.parametrize("command", [SILENT, GONE, ("/nowhere",)], ids=["silent", "gone", "missing"])
async def test_a_compiler_that_does_not_answer_can_be_asked_again(command: tuple[str, ...]) -> None:
    structures = Structures(command, answer_s=0.2)
    for _ in range(2):
        with pytest.raises(NotServing, match="could not be checked in time"):
            await check(structures, GOOD[0])
    assert not structures._verdicts
    await structures.close()


async def test_a_tokenizer_that_llguidance_cannot_use_refuses_structures_alone() -> None:
    info = model_info()
    model = TextModel(info)
    model.tokenizer_json = gzip.compress(b'{"model": {"type": "WordLevel"}}')
    structures = Structures()
    with pytest.raises(BadInput, match="cannot use this model's tokenizer"):
        await check(structures, GOOD[0], model)
    await structures.close()


async def test_another_model_has_a_compiler_of_its_own(structures: Structures) -> None:
    other = TextModel(model_info())
    other.fingerprint = "other"
    await check(structures, GOOD[0], other)
    await check(structures, GOOD[1])


async def test_a_structure_travels_with_its_request_and_is_part_of_it(structures: Structures) -> None:
    one, again, other = [await submission(structures, regex) for regex in ("a+", "a+", "b+")]
    assert one.sampling.structure == Structure(regex="a+")
    assert same(one, again)
    assert not same(one, other)


async def test_a_bad_structure_makes_no_submission(structures: Structures) -> None:
    with pytest.raises(BadInput, match=r"^structure\.regex: "):
        await submission(structures, "(")


async def submission(structures: Structures, regex: str) -> Submit:
    return await validate.submission(
        inference_pb2.GenerateRequest(prompt="a", request_id="r", structure=Structure(regex=regex)),
        MODEL,
        tenant="t",
        timeout_s=60,
        max_input_bytes=4000,
        encoders=asyncio.Semaphore(),
        structures=structures,
    )
