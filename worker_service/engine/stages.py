"""One model over several stages, each with some of its layers and their KV: the first one leads, and one message goes
through all others and back to it for each pass. No sockets here: a ring carries the messages (worker_service/ring.py).

Between stages goes what goes between layers, in float32 where the native decoder keeps it so. So the text is that of
one process. The paper's way to verify ("Speculative Decoding in Decentralized LLM Inference", arXiv 2511.11733) also
accepts tokens that the target would not choose: that is not done here, since it would change the text.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from worker_service.engine.attention import QueryRange
from worker_service.engine.cut import LayerElsewhere, NoEmbedding, layer_list, own_layers
from worker_service.engine.kv import BlockPool
from worker_service.engine.target import Passed, Target

Positions = Sequence[int]


class Call(NamedTuple):
    """What goes from stage to stage: a name, JSON, and hidden states as bytes."""

    name: str
    arguments: Sequence[Any]
    body: Any = b""  # whatever has a buffer


class Ring(Protocol):
    """The other stages, as the first one sees them. Both raise ParallelError when a stage is gone."""

    def call(self, call: Call) -> None:
        """Send to the next stage."""

    def answer(self) -> Call:
        """The next call that came back from the last stage."""


_ANSWERED = ("compute", "new_pool")  # the others need no answer: a stage that cannot do them ends


class StagedTarget(Target):
    """The first stage: a target whose later layers are elsewhere."""

    def __init__(self, model: Any, ring: Ring) -> None:
        """`model`: cut for the first stage."""
        super().__init__(model)
        self._ring = ring
        self._asked: tuple[Positions, Positions, Sequence[QueryRange]] = (), (), ()

    def new_pool(self, blocks: int, block_tokens: int, attention: str = "auto") -> BlockPool:
        """As of a target, of the first stage alone. Raises ValueError with what another stage says, too."""
        pool = super().new_pool(blocks, block_tokens, attention)
        self._ring.call(Call("new_pool", (blocks, block_tokens, "")))
        if problem := self._ring.answer().arguments[2]:
            raise ValueError(problem)
        if self._decoder is None:  # the model's own forward pass asks where the first missing layer was
            behind = layer_list(self._model)[own_layers(self._model).stop]
            assert isinstance(behind, LayerElsewhere)
            behind.instead = self._through_others
        return pool

    def expose(self, layers: Sequence[int]) -> None:
        """Raises ValueError: of most layers another stage has the states."""
        raise ValueError("its drafter reads states between layers, and other stages have them: take another drafter")

    def _compute(
        self, input_ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int], ranges: Sequence[QueryRange]
    ) -> Passed:
        self._asked = positions, wanted, ranges
        return super()._compute(input_ids, positions, wanted, ranges)

    def _pass(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._decoder is None:
            return super()._pass(input_ids, positions, wanted)
        x = self._decoder.embed(input_ids)
        self._decoder.through(x, positions)
        hidden = self._decoder.normed(self._others(x))
        return self._model.get_output_embeddings()(hidden[None])[0], hidden

    def _through_others(self, hidden: torch.Tensor) -> torch.Tensor:
        """All rows [1, T, hidden size], of which those are filled whose logits are wanted."""
        result = torch.zeros_like(hidden)
        result[0, list(self._asked[1])] = self._others(hidden[0]).to(hidden)
        return result

    def _others(self, x: torch.Tensor) -> torch.Tensor:
        """What the other stages make of `x` [T, hidden size]: those rows whose logits are wanted."""
        self._ring.call(Call("compute", (str(x.dtype), *self._asked), _bytes(x)))
        answer = self._ring.answer()
        return _tensor(answer.body, answer.arguments[0], x.shape[1])

    def save(self, name: str, table: Sequence[int]) -> None:
        self._ring.call(Call("save", (name, list(table))))
        super().save(name, table)

    def restore(self, name: str, first: int, table: Sequence[int]) -> None:
        self._ring.call(Call("restore", (name, first, list(table))))
        super().restore(name, first, table)

    def discard(self, name: str) -> None:
        self._ring.call(Call("discard", (name,)))
        super().discard(name)


class Stage(Target):
    """A stage behind the first: it knows no requests and draws no tokens, but does what it is called for."""

    def __init__(self, model: Any, *, last: bool) -> None:
        """`model`: cut for this stage."""
        super().__init__(model)
        self._last, self.problem = last, ""
        embedding, layers, own = model.get_input_embeddings(), layer_list(model), own_layers(model)
        assert isinstance(embedding, NoEmbedding)
        embedding.dtype = self.dtype
        before = layers[own.start - 1]
        assert isinstance(before, LayerElsewhere)
        self._before = before
        layers[own.stop - 1].register_forward_hook(self._keep)
        self._after: torch.Tensor | None = None

    def take(self, call: Call) -> Call | None:
        """Do it, and return what goes on to the next stage, of the last one to the first; None: nothing does.

        `problem` then tells whether this stage cannot serve the model. Raises what a pass raises, and ValueError.
        """
        match call:
            case "compute", [dtype, positions, wanted, ranges], body:
                x = _tensor(body, dtype, self.width)
                x = self._run(x, positions, [QueryRange(*each) for each in ranges])
                if self._last:
                    x = x[wanted]
                call = Call("compute", (str(x.dtype), positions, wanted, ranges), _bytes(x))
            case "new_pool", [blocks, block_tokens, problem], _:
                call = Call("new_pool", (blocks, block_tokens, problem or self._pool_problem(blocks, block_tokens)))
            case ("save" | "restore" | "discard") as name, arguments, _:
                getattr(self, name)(*arguments)
            case name, _, _:
                raise ValueError(f"the first stage asks for {name!r}: it is of another version")
        return None if self._last and call.name not in _ANSWERED else call

    @property
    def width(self) -> int:
        """Numbers in a hidden state."""
        return int(self._model.config.get_text_config().hidden_size)

    def _pool_problem(self, blocks: int, block_tokens: int) -> str:
        try:
            self.new_pool(blocks, block_tokens)
        except torch.OutOfMemoryError:
            raise  # another time there may be room: this stage ends, and is started again
        except Exception as error:  # whatever a model of its own kind does in a pass
            self.problem = " ".join(str(error).split()) or type(error).__name__
        return self.problem

    def _run(self, x: torch.Tensor, positions: Sequence[int], ranges: Sequence[QueryRange]) -> torch.Tensor:
        """`x` [T, hidden size] after this stage's layers."""
        (where,) = self._memory.begin(ranges, (positions,))
        if self._decoder is not None:
            x = x.float()
            self._decoder.through(x, where)
            return x
        x = x.to(self.device, self.dtype)
        self._before.instead = lambda _: x[None]
        self._model(input_ids=torch.zeros_like(where)[None], position_ids=where[None], use_cache=False)
        assert self._after is not None
        return self._after

    def _keep(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._after = (output[0] if isinstance(output, tuple) else output)[0]


def _bytes(x: torch.Tensor) -> Any:
    return memoryview(x.detach().cpu().contiguous().view(torch.uint8).numpy().ravel())  # type: ignore[arg-type]


def _tensor(body: Any, dtype: str, width: int) -> torch.Tensor:
    """[n, width]. Raises ValueError if these are not so many bytes."""
    kind = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}.get(dtype)
    if kind is None or len(body) % (width * kind.itemsize):
        raise ValueError(f"{len(body)} bytes are no hidden states of {width} numbers in {dtype}")
    return torch.frombuffer(body, dtype=kind).view(-1, width) if len(body) else torch.empty(0, width, dtype=kind)
