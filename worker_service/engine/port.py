"""The engine as everybody outside sees it: the protocol that runner, warm-up, link and reports rely on. No engine
lives here, and no torch: a worker whose engine is somebody else's imports this and never our tensors."""

from collections.abc import Sequence
from typing import Protocol

from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.types import Admission, Held, Run, StepResult


class EnginePort(Protocol):
    """Admitted requests, and steps over them. Constructed anywhere; from `bind_thread` on it is used in one thread.

    Sizes may be asked for once `bind_thread` has returned.
    """

    @property
    def blocks(self) -> int:
        """Blocks of KV."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""

    @property
    def free_blocks(self) -> int:
        """Blocks of KV that nobody holds."""

    @property
    def host_blocks(self) -> int:
        """Blocks of KV that fit into the host's memory; 0: nothing is offloaded."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def bind_thread(self, threads: int) -> None:
        """Called once, in the thread that will compute. `threads`: of the CPU, for it; 0: all cores."""

    def admit(self, admission: Admission) -> None:
        """Take a request. KV that the engine has of it already may be kept as far as it agrees with its tokens.

        A request that cannot be run is taken too: its next row says why."""

    def forget(self, request_id: str) -> None:
        """Give back all that it holds. Unknown ids are no error, here and below."""

    def drop(self, request_id: str) -> None:
        """Give back its KV; when it runs again that is computed anew from its tokens."""

    def offload(self, request_id: str) -> None:
        """Move its KV to the host's memory until it runs again; where there is no room, drop it."""

    def held(self) -> list[Held]:
        """All requests that were admitted and not forgotten, ended or not."""

    def runnable(self, run: Run) -> bool:
        """Whether a step with this entry in its schedule could do something for the request."""

    def step(self, schedule: Sequence[Run], slots: int) -> StepResult:
        """Run the first `slots` runnable requests of `schedule`, best first. Raises what the device raises."""

    def weigh_drafts(self, costs: PassCosts | None) -> None:
        """From now on a step verifies those drafts that make it most tokens a second, by `costs`, which go on learning.
        None: all drafts."""

    def rehearse_drafts(self, batch: int, draft_len: int) -> None:
        """Draft `draft_len` tokens for `batch` requests at full cost, for nobody. The warm-up times it."""

    def rehearse_offload(self, blocks: int) -> None:
        """Copy so many blocks to the host's memory and back, for nobody. The warm-up times it."""
