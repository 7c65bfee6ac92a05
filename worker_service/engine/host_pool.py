"""KV that was offloaded to the host's memory: which request has how much there, and how much more there is room for.

The copies themselves lie with the target, which knows the tensors.
"""

from worker_service.engine.request import EngineRequest, Saved
from worker_service.engine.target import Target


class HostPool:
    """Room for `blocks` blocks of offloaded KV."""

    def __init__(self, target: Target, blocks: int) -> None:
        self.blocks = self.free_blocks = blocks
        self._target = target

    def save(self, request: EngineRequest) -> None:
        """Copy the request's KV to the host if it is not here yet and there is room for all of it; its blocks on the
        device are given back in any case."""
        needed = request.kv.used_blocks
        if not request.saved and 0 < needed <= self.free_blocks:
            self._target.save(request.id, request.kv.table[:needed])
            request.saved = Saved(needed, request.kv.length)
            self.free_blocks -= needed
        request.kv.release()

    def restore(self, request: EngineRequest) -> None:
        """Copy the request's KV back behind the blocks that it shares with others already, and discard the copy.

        There must be `saved` KV, and free blocks for it.
        """
        assert request.saved is not None
        kv, shared = request.kv, request.kv.blocks
        kv.extend(max(request.saved.length - kv.length, 0))
        self._target.restore(request.id, shared, kv.table[shared : kv.used_blocks])
        self.discard(request)

    def discard(self, request: EngineRequest) -> None:
        """Give back what the request has here, if anything."""
        if request.saved:
            self._target.discard(request.id)
            self.free_blocks += request.saved.blocks
            request.saved = None
