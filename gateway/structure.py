"""Checks what an output must look like: sizes here, and the grammar by a compiler in a process of its own. Nothing is
masked here; the workers compile the same grammar again."""

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from gateway.text import TextModel
from protos.errors import BadInput, NotServing
from protos.models import unpacked
from protos.structure import grammar
from protos.v1.types_pb2 import Structure

COMMAND = (sys.executable, "-P", "-m", "gateway.grammars")
MAX_BYTES = 64 << 10
MAX_CHOICES = 1000
START_S = 60.0  # of the compiler, with a large tokenizer on a busy machine
ANSWER_S = 60.0  # on a busy machine: the compiler's own limit is CPU time
TOO_HARD = "takes too much time or memory to compile"
_KEPT = 1000  # verdicts
_RETRY_MS = 1000

Check = Callable[[Structure], Awaitable[None]]  # raises what Structures.check raises
Loosen = Callable[[Check], Awaitable[Structure]]


class Structures:
    """The verdicts on structures, the newest kept, and the compiler, which is started when it is first needed. It ends
    when its stdin does, so it cannot outlive this process by more than the grammar at hand."""

    def __init__(self, command: tuple[str, ...] = COMMAND, answer_s: float = ANSWER_S) -> None:
        self._command, self._answer_s = command, answer_s
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[str]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._waiting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant, while in use
        self._process: asyncio.subprocess.Process | None = None
        self._compiles_for = ""  # fingerprint of the model

    async def check(self, structure: Structure, model: TextModel, tenant: str) -> None:
        """One grammar of a `tenant` waits for the compiler, its others behind that one: tenants have it in turn. Raises
        BadInput; NotServing where the compiler does not answer."""
        field = f"structure.{structure.WhichOneof('kind')}" if structure.WhichOneof("kind") else "structure"
        check_sizes(field, structure)
        try:
            form = grammar(structure)
        except ValueError as error:
            raise BadInput(field, str(error)) from error
        if problem := await self._verdict(form, model, tenant):
            raise BadInput(field, problem)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._kill()

    async def _verdict(self, form: str, model: TextModel, tenant: str) -> str:
        key = hashlib.blake2b(form.encode(), digest_size=16, key=model.fingerprint.encode()[:64]).digest()
        place = self._waiting.setdefault(tenant, asyncio.Lock())
        if key not in self._verdicts and key not in self._asking:
            await place.acquire()
            if key not in self._verdicts and key not in self._asking:
                self._asking[key] = asyncio.create_task(self._ask(form, model))
                self._asking[key].add_done_callback(lambda asked: self._keep(key, asked))
                # The place stays taken until there is an answer, though the client hangs up.
                self._asking[key].add_done_callback(lambda _: place.release())
            else:
                place.release()
        if (task := self._asking.get(key)) is not None:
            return await asyncio.shield(task)
        self._verdicts.move_to_end(key)
        return self._verdicts[key]

    def _keep(self, key: bytes, asked: "asyncio.Task[str]") -> None:
        del self._asking[key]
        if not asked.cancelled() and asked.exception() is None:
            self._verdicts[key] = asked.result()
            if len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)

    async def _ask(self, form: str, model: TextModel) -> str:
        async with self._one_at_a_time:
            try:
                if problem := await self._start(model):
                    await self._kill()
                    return problem
                return await self._exchange(form, self._answer_s)
            except EOFError:  # it was ended by its limits, or by the grammar itself
                await self._kill()
                return TOO_HARD
            except OSError as error:  # a timeout is one
                await self._kill()
                raise NotServing("the structure could not be checked in time", retry_after_ms=_RETRY_MS) from error
            except BaseException:  # cancelled, or no answer of ours: the next one would be taken for another grammar's
                await self._kill()
                raise

    async def _start(self, model: TextModel) -> str:
        """Have a compiler for this model. Returns what is wrong with its tokenizer."""
        if self._process is not None and self._compiles_for == model.fingerprint:
            return ""
        await self._kill()
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # In a session of its own: Ctrl-C in a terminal is the gateway's to act on.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
        )
        self._compiles_for = model.fingerprint
        text = await asyncio.to_thread(unpacked, model.tokenizer_json)
        described = {"tokenizer": text, "vocab_size": model.vocab_size, "eos_ids": model.eos_ids}
        try:
            return await self._exchange(described, START_S)
        except EOFError as error:
            raise OSError("the compiler did not start") from error

    async def _exchange(self, question: object, timeout_s: float) -> str:
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with asyncio.timeout(timeout_s):
            try:
                stdin.write(json.dumps(question).encode() + b"\n")
                await stdin.drain()
                return str(json.loads(await stdout.readuntil()))
            except ConnectionError as error:
                raise EOFError("the compiler has ended") from error

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


def check_sizes(field: str, structure: Structure) -> None:
    """Raises BadInput, of `field`."""
    texts = structure.choice.texts
    if structure.HasField("choice"):
        if not texts or not all(texts):
            raise BadInput(field, "must have at least one text, and none that is empty")
        if len(texts) > MAX_CHOICES:
            raise BadInput(field, f"{len(texts)} texts; at most {MAX_CHOICES}")
    for name in ("json_schema", "regex", "lark"):
        if structure.HasField(name) and not getattr(structure, name):
            raise BadInput(field, "must not be empty")
    if structure.ByteSize() > MAX_BYTES:
        raise BadInput(field, f"{structure.ByteSize()} bytes; at most {MAX_BYTES}")
