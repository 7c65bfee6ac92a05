"""Attention of query ranges of about the same past, whose keys and values are gathered from their blocks and padded to
the longest. In pieces: of requests, of KV heads, of rows. What a piece takes of a device's memory is bounded, however
long the texts are. Where blocks lie and who has them is not known here."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker_service.engine.probe import Options

PIECE_BYTES = 256 << 20  # of gathered keys and values, and again of scores and masks; one row of one text may take more


class Piece(NamedTuple):
    """How many a piece has at most of each."""

    requests: int
    heads: int  # of keys and values
    rows: int  # tokens of a request


class Kept:
    """The masks that the layers of a pass share, as far as they are short. Others are made in each layer anew."""

    def __init__(self) -> None:
        self._left = PIECE_BYTES // 8

    def takes(self, size: int) -> bool:
        """Whether so many bytes more may be kept; then they are."""
        if size > self._left:
            return False
        self._left -= size
        return True


class Group:
    """Query ranges that are computed as one padded batch of B."""

    def __init__(self, numbers: Sequence[torch.Tensor], block_tokens: int, kept: Kept) -> None:
        """`numbers`: as BlockPlan.padded."""
        self.rows, self._positions, self.tables = numbers
        self._past, self._kept = self.tables.shape[1] * block_tokens, kept
        self._keys = torch.arange(self._past, device=self.tables.device)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Options, out: torch.Tensor
    ) -> None:
        """Write the results of its tokens to `out`, which is as `query` [T, kv heads, heads of each, dim]. `keys` and
        `values`: [blocks, kv heads, block_tokens, dim]."""
        capped = bool(options.softcap) or options.sinks is not None
        (batch, longest), (_, heads, share, dim) = self.rows.shape, query.shape
        size = piece(batch, heads, longest, share, self._past, 2 * dim * keys.itemsize, capped)
        if size == (batch, heads, longest):  # by far the most: nothing is launched for the sake of pieces
            past = _gathered(keys, values, self.tables)
            self._attend(query, past, self.rows, self._positions, options, out)
            return
        for some in _parts(heads, size.heads):
            own, result = query[:, some], out[:, some]
            sinks = None if options.sinks is None else options.sinks.view(heads, share)[some].flatten()
            for one in _parts(batch, size.requests):
                past = _gathered(keys[:, some], values[:, some], self.tables[one])
                for part in _parts(longest, size.rows):
                    numbers = self.rows[one, part], self._positions[one, part]
                    self._attend(own, past, *numbers, options._replace(sinks=sinks), result)

    def _attend(
        self,
        query: torch.Tensor,
        past: Sequence[torch.Tensor],
        rows: torch.Tensor,
        positions: torch.Tensor,
        options: Options,
        out: torch.Tensor,
    ) -> None:
        """As `attend`, of these `rows` [B, n] alone. `past`: keys and values [B, kv heads, past, dim]."""
        own = query[rows].permute(0, 2, 3, 1, 4)  # [B, kv heads, heads of each, n, dim]
        mask = self._mask(positions, options.window, query.shape[2])
        attention = _plain if options.softcap or options.sinks is not None else _fused
        result = attention(own.flatten(2, 3), past[0], past[1], mask, options).view(own.shape)
        out[rows] = result.permute(0, 3, 1, 2, 4)

    def _mask(self, positions: torch.Tensor, window: int, share: int) -> torch.Tensor:
        """Which keys the tokens at `positions` [B, n] see [B, 1, share * n, keys], for each of `share` heads: none
        after it, and none further back than `window`."""
        if positions is self._positions and (window, share) in self._masks:
            return self._masks[window, share]
        own = positions[:, :, None]
        seen = self._keys <= own
        seen = seen & (self._keys > own - window) if window else seen
        mask = seen.repeat(1, share, 1)[:, None]
        if positions is self._positions and self._kept.takes(mask.numel()):
            self._masks[window, share] = mask
        return mask


def _gathered(keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor) -> list[torch.Tensor]:
    """Of `tables` [B, blocks], as [B, kv heads, blocks * block_tokens, dim]."""
    return [x[tables].transpose(1, 2).flatten(2, 3) for x in (keys, values)]


def piece(batch: int, heads: int, rows: int, share: int, past: int, a_token: int, capped: bool) -> Piece:
    """The largest that stays within PIECE_BYTES, if one row of one text does.

    `heads`: of keys and values, each of `share` query heads; `past`: tokens; `a_token`: bytes of keys and values of a
    token and head; `capped`: scores are computed here, and not in a kernel that keeps none but the mask's.
    """
    gathered = 2 * past * a_token  # of a request and head: what is gathered is copied into another order
    some = min(heads, max(PIECE_BYTES // gathered, 1))
    scores = past * share * (16 * some if capped else 8)  # of a row of a request
    requests = min(batch, max(min(PIECE_BYTES // (gathered * some), PIECE_BYTES // scores), 1))
    return Piece(requests, some, min(rows, max(PIECE_BYTES // (scores * requests), 1)))


def _parts(size: int, most: int) -> Iterator[slice]:
    return (slice(begin, min(begin + most, size)) for begin in range(0, size, most))


# Both: `query` and the result [B, kv heads, n, dim], `keys` and `values` [B, kv heads, past, dim], `mask`
# [B, 1, n, past].


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, options: Options
) -> torch.Tensor:
    """By torch's fastest kernel, which knows neither caps nor sinks."""
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scale)


def _plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, options: Options
) -> torch.Tensor:
    scores = (query @ keys.mT).float() * options.scale
    if options.softcap:
        scores = (scores / options.softcap).tanh() * options.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:  # one for each head: of a KV head those of its share, each for all its tokens
        sinks = options.sinks.float().view(keys.shape[1], -1, 1)
        sinks = sinks.expand(-1, -1, query.shape[2] // sinks.shape[1]).flatten(1)[..., None]
        weights = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(values.dtype) @ values
