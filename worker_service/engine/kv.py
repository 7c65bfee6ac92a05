"""KV memory: one contiguous buffer per request, accounted in blocks. Who runs or is evicted is not decided here."""

import torch


class KVPool:
    """The budget of KV blocks, and the shape of what fills them."""

    def __init__(
        self,
        *,
        blocks: int,
        block_tokens: int,
        layers: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.blocks = self.free_blocks = blocks
        self.block_tokens = block_tokens
        self._shape = (layers, 2, heads, 0, head_dim)
        self._device, self._dtype = device, dtype

    def buffer(self, tokens: int) -> torch.Tensor:
        """[layers, 2 (key, value), heads, tokens, head_dim], not initialised."""
        layers, two, heads, _, head_dim = self._shape
        return torch.empty((layers, two, heads, tokens, head_dim), device=self._device, dtype=self._dtype)


class KV:
    """The keys and values of one request's first `length` tokens."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._data = pool.buffer(0)
        self.length = 0
        self.blocks = 0
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # (keys, values), each [heads, capacity, dim]

    @property
    def room(self) -> int:
        """How many tokens can still be added, with all the free blocks of the pool."""
        return (self.blocks + self._pool.free_blocks) * self._pool.block_tokens - self.length

    @property
    def own_room(self) -> int:
        """How many tokens can still be added without a new block."""
        return self.blocks * self._pool.block_tokens - self.length

    def extend(self, tokens: int) -> None:
        """Make place for `tokens` more (at most `room`), and count them; who computes them writes them."""
        needed = -(-(self.length + tokens) // self._pool.block_tokens)
        if needed > self.blocks:
            self._pool.free_blocks -= needed - self.blocks
            self.blocks = needed
            grown = self._pool.buffer(needed * self._pool.block_tokens)
            grown[:, :, :, : self.length] = self._data[:, :, :, : self.length]
            self._data = grown
            self.layers = tuple((layer[0], layer[1]) for layer in grown)
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget what follows the first `length` tokens. The blocks stay: the next round writes there."""
        self.length = min(self.length, length)

    def release(self) -> None:
        """Give everything back."""
        self._pool.free_blocks += self.blocks
        self._data, self.layers = self._pool.buffer(0), ()
        self.length = self.blocks = 0
