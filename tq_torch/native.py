"""Every operation in plain torch: the CPU default, and the portable fall-back elsewhere.

Attention streams over tiles of tokens with an online softmax, so that what it allocates besides
its result is bounded by a constant. On the CPU, lengths are read to skip work. Elsewhere nothing
is: the upper bounds of the call limit the loops, and the device is never waited for.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 1; TurboQuant, arXiv 2504.19874.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tq_core import packing
from tq_core.codebook import midpoints
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.reference import FP16_MAX, INPUT_MAX
from tq_core.validation import AttentionCall
from tq_torch import pages
from tq_torch.pages import PageReader

#: Elements of the largest temporary: what caches hold, or what keeps a GPU busy. Just below 2**20,
#: the scores of a decode tile (32 times fewer) stay under the size at which torch wakes threads.
TILE_ELEMENTS = {"cpu": 10**6, "other": 2**23}
#: Query rows a block, and tokens a tile as long as several blocks share it.
BLOCK_ROWS = 128
SHARED_TILE_TOKENS = 128
#: Temporaries as large as a tile's scores that live at once.
SCORE_COPIES = 4


# --- constants ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Writer:
    """What ``store`` needs of a codec; arithmetic that chooses codes is in float64."""

    rotation: Tensor  # f64 [D, D], transposed
    key_scale: Tensor  # f32 [1 or Hk, 1]
    offsets: dict[str, Tensor | None]  # f32 [1 or Hk, D]
    transforms: dict[str, Tensor | None]  # f64 [1 or Hk, D, D], transposed
    midpoints: dict[str, Tensor | None]  # f64 [2**bits - 1]
    centroids: dict[str, Tensor | None]  # f64 [2**bits]


@dataclass(frozen=True)
class _Reader:
    """What readers need of a codec. A matrix of None is the identity, an offset of None zero."""

    key_table: pages.Table
    value_table: pages.Table
    query_matrix: Tensor | None  # f32 [1 or Hk, D, D], what a query row is multiplied by
    key_matrix: Tensor | None  # its transpose: what decoded keys are multiplied by
    output_matrix: Tensor | None  # what an output row, or decoded values, are multiplied by
    key_scale: Tensor | None  # f32 [1 or Hk, 1, 1]
    key_offset: Tensor | None  # f32 [1 or Hk, 1, D]
    value_offset: Tensor | None


@lru_cache(maxsize=32)
def _writer(codec: Codec, device: torch.device) -> _Writer:
    def tensor(array, dtype=torch.float64):
        return None if array is None else torch.tensor(array, dtype=dtype, device=device)

    def transposed(array):
        return None if array is None else tensor(array.swapaxes(-1, -2))

    levels = {"key": codec.centroids, "value": codec.value_centroids}
    with torch.inference_mode(False):
        return _Writer(
            rotation=tensor(codec.rotation.T),
            key_scale=tensor(codec.key_scale[:, None], torch.float32),
            offsets={
                "key": tensor(codec.key_offset, torch.float32),
                "value": tensor(codec.value_offset, torch.float32),
            },
            transforms={
                "key": transposed(codec.key_transform),
                "value": transposed(codec.value_transform),
            },
            midpoints={k: None if a is None else tensor(midpoints(a)) for k, a in levels.items()},
            centroids={k: tensor(a) for k, a in levels.items()},
        )


@lru_cache(maxsize=32)
def _reader(codec: Codec, device: torch.device) -> _Reader:
    def tensor(array):
        return torch.tensor(array, dtype=torch.float32, device=device)

    config = codec.config
    with torch.inference_mode(False):
        query_matrix = codec.query_matrix if codec.has_key_matrix else None
        key_offset, value_offset = codec.key_offset, codec.value_offset
        return _Reader(
            key_table=pages.make_table(
                pages.key_levels(codec), config.key_bits, config.key_packing, device=device
            ),
            value_table=pages.make_table(
                pages.value_levels(codec), config.value_bits, device=device
            ),
            query_matrix=None if query_matrix is None else tensor(query_matrix.swapaxes(1, 2)),
            key_matrix=None if query_matrix is None else tensor(query_matrix),
            output_matrix=(
                tensor(codec.output_matrix.swapaxes(1, 2)) if codec.has_value_matrix else None
            ),
            key_scale=None if config.key_is_codebook else tensor(codec.key_scale[:, None, None]),
            key_offset=None if key_offset is None else tensor(key_offset[:, None]),
            value_offset=None if value_offset is None else tensor(value_offset[:, None]),
        )


# --- arithmetic -----------------------------------------------------------------------------


def _reduces_precision(device: torch.device) -> bool:
    """Whether a float32 matrix product may run in TF32 or bf16, by the user's global settings."""
    if torch.is_autocast_enabled(device.type):
        return True
    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    try:
        return backend.matmul.fp32_precision not in ("none", "ieee")
    except AttributeError:  # before torch 2.9
        return torch.get_float32_matmul_precision() != "highest"


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """float32 product ``[n, i, j] @ [n, j, k]`` in full precision, whatever the settings are."""
    if _reduces_precision(a.device):
        return torch.bmm(a.double(), b.double()).float()
    return torch.bmm(a, b)


def _transform(x: Tensor, matrix: Tensor | None) -> Tensor:
    """Rows of ``x`` ``[n, Hk, m, D]`` times ``matrix`` ``[1 or Hk, D, D]``."""
    if matrix is None:
        return x
    heads = matrix.shape[0]
    rows = x.reshape(1, -1, x.shape[-1]) if heads == 1 else x.transpose(0, 1).flatten(1, 2)
    product = _matmul(rows, matrix)
    if heads == 1:
        return product.view(x.shape)
    return product.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _tile_elements(device: torch.device) -> int:
    return TILE_ELEMENTS["cpu" if device.type == "cpu" else "other"]


# --- store ----------------------------------------------------------------------------------


def store(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
) -> None:
    """See :func:`tq_torch.store`; arguments are checked."""
    if not key.shape[0] or not cache.shape[0]:
        return
    writer = _writer(codec, key.device)
    slots = slot_mapping.long()
    keep = (slots >= 0) & _last_of_equals(slots)
    if key.device.type == "cpu":
        source = keep.nonzero().flatten()
        anything = None
    else:
        # A row to skip repeats one that is kept, or, where there is none, what is stored already.
        every = torch.arange(len(slots), device=key.device)
        source = torch.where(keep, every, keep.int().argmax())
        anything = keep.any()
    slots = slots.index_select(0, source).clamp_(min=0)
    rows = max(1, _tile_elements(key.device) // (layout.num_kv_heads * layout.head_dim))
    for rows_of_tile, slots_of_tile in zip(source.split(rows), slots.split(rows), strict=True):
        page = slots_of_tile // layout.page_size
        place = (page, slots_of_tile - page * layout.page_size)
        for region, data in _packed(
            key.index_select(0, rows_of_tile), value.index_select(0, rows_of_tile), layout, writer
        ):
            target = region.view(cache)
            data = data.reshape(-1, *region.shape[1:])
            if anything is not None:
                data = torch.where(anything, data, target[place])
            target.index_put_(place, data)


def _last_of_equals(x: Tensor) -> Tensor:
    """Mask of the elements of ``x`` ``[n]`` that no later element equals."""
    ordered, order = torch.sort(x, stable=True)
    last = torch.ones_like(x, dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    return torch.empty_like(last).index_copy_(0, order, last)


def _packed(
    key: Tensor, value: Tensor, layout: CacheLayout, writer: _Writer
) -> Iterator[tuple[pages.Region, Tensor]]:
    """Regions and their new bytes, uint8 ``[N, Hk, bytes]``."""
    config, places = layout.config, pages.regions(layout)
    coded = _coded("key", key, writer)
    if config.key_is_codebook:
        codes, fields = _quantize_codebook("key", coded, config.norm_correction, writer)
    else:
        scaled = (coded.float() / writer.key_scale).clamp_(-packing.E4M3_MAX, packing.E4M3_MAX)
        codes, fields = scaled.to(torch.float8_e4m3fn).view(torch.uint8), []
    yield from _parts(places.key, pages.pack(codes, config.key_bits, config.key_packing))
    coded = _coded("value", value, writer)
    if config.value_is_codebook:
        codes, more = _quantize_codebook("value", coded, config.norm_correction, writer)
    else:
        codes, more = _quantize_affine(coded, config.value_bits)
    yield from _parts(places.value, pages.pack(codes, config.value_bits))
    for region, field in zip(places.fields, [*fields, *more], strict=True):
        yield region, field[..., None].view(torch.uint8)


def _parts(
    regions: tuple[pages.Region, ...], data: Tensor
) -> Iterator[tuple[pages.Region, Tensor]]:
    return zip(regions, data.split([r.num_bytes for r in regions], -1), strict=True)


def _coded(name: str, x: Tensor, writer: _Writer) -> Tensor:
    """``T (x - offset)``, ``[N, Hk, D]``: float32, or float64 after a transform."""
    x = x.float().nan_to_num(nan=0.0, posinf=INPUT_MAX, neginf=-INPUT_MAX)
    x = x.clamp_(-INPUT_MAX, INPUT_MAX)
    offset, transform = writer.offsets[name], writer.transforms[name]
    if offset is not None:
        x -= offset
    if transform is None:
        return x
    product = torch.matmul(x.double().transpose(0, 1), transform).transpose(0, 1)
    return product.clamp(-INPUT_MAX, INPUT_MAX)


def _quantize_codebook(
    name: str, coded: Tensor, norm_correction: bool, writer: _Writer
) -> tuple[Tensor, list[Tensor]]:
    edges, centroids = writer.midpoints[name], writer.centroids[name]
    assert edges is not None
    assert centroids is not None
    coded = coded.double()
    norm = coded.square().sum(-1).sqrt()
    unit = torch.where(norm[..., None] > 0, coded / norm[..., None], 0)
    codes = torch.bucketize(unit @ writer.rotation, edges, right=True, out_int32=True)
    if norm_correction:
        chosen = centroids.index_select(0, codes.flatten()).view(coded.shape)
        length = chosen.square_().sum(-1).sqrt()
        norm = torch.where(length > 0, norm / length, 0)
    return codes, [norm.clamp(max=FP16_MAX).half()]


def _quantize_affine(coded: Tensor, bits: int) -> tuple[Tensor, list[Tensor]]:
    top = 2**bits - 1
    x = coded.clamp(-FP16_MAX, FP16_MAX).float()
    low, high = x.aminmax(dim=-1)
    zero = _unsigned_zero(low.half())
    scale = _unsigned_zero(((high - zero.float()) / top).half())
    wide_zero, wide_scale = zero.float()[..., None], scale.float()[..., None]
    steps = ((x - wide_zero) / wide_scale + 0.5).floor_().nan_to_num_().clamp_(0, top)
    return torch.where(wide_scale == 0, 0, steps), [scale, zero]


def _unsigned_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0, x)


# --- attention ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """Blocks of query rows, int64 ``[W]`` each; a block's rows belong to one sequence.

    A row sees tokens ``low <= j < high`` of its own, and its block those of any of its rows.
    """

    sequence: Tensor
    row: Tensor  # the first row's number in the batch
    rows: Tensor
    position: Tensor  # the first row's position in its sequence
    length: Tensor  # tokens of the sequence
    low: Tensor
    high: Tensor

    def select(self, index: Tensor | slice) -> _Blocks:
        return _Blocks(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class _Span:
    """The loop over the tiles of some blocks, in host integers.

    Attributes:
        rows: rows a block, the shorter ones padded.
        pages: most pages that a block sees.
        visible: tokens ``[first, last)`` that all rows of all blocks see, counted from the first
            token of each block's first page.
    """

    rows: int
    pages: int
    visible: tuple[int, int] = (0, 0)

    def sees(self, first: int, last: int) -> bool:
        """Whether all rows see the tokens ``[first, last)``."""
        return self.visible[0] <= first and last <= self.visible[1]


def attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    out: Tensor,
    *,
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """See :func:`tq_torch.attention`; arguments are checked, ``out`` is written, LSE returned."""
    device, num_tokens = query.device, call.num_tokens
    # Without knowing which rows are padding they are all written: the surplus to one row more.
    direct = device.type == "cpu"
    result = (
        out
        if direct and not _share_storage(out, query)
        else out.new_empty((num_tokens + (not direct), *out.shape[1:]))
    )
    lse = torch.empty((len(result), call.num_query_heads), dtype=torch.float32, device=device)
    result.zero_()
    lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks)
    if num_tokens and call.num_seqs and call.max_pages and cache.shape[0]:
        if query_start_loc is None:
            query_start_loc = torch.arange(call.num_seqs + 1, device=device)
        kernel = _Attention(
            query, cache, block_table, result, lse, call, layout, codec, sinks, alibi_slopes
        )
        for blocks, span in _schedule(query_start_loc, seq_lens, device, call, layout):
            kernel.run(blocks, span)
    if result is not out:
        out.copy_(result[:num_tokens])
    return lse[:num_tokens]


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _schedule(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    device: torch.device,
    call: AttentionCall,
    layout: CacheLayout,
) -> Iterator[tuple[_Blocks, _Span]]:
    """Blocks to run together."""
    size, on_host = layout.page_size, device.type == "cpu"
    capacity = _tile_elements(device)
    longest = call.max_query_len
    if on_host:
        longest = int(query_start_loc.diff().max())
    rows = min(longest, BLOCK_ROWS, capacity // (call.num_query_heads * layout.head_dim))
    rows = max(1, rows)
    blocks = _make_blocks(query_start_loc, seq_lens, rows, call, layout)

    def width(rows: int, num_pages: int) -> int:
        """Blocks of ``rows`` rows that see ``num_pages`` pages."""
        token = _elements_a_token(rows, call, layout)
        tokens = min(num_pages * size, SHARED_TILE_TOKENS)
        row = call.num_query_heads * layout.head_dim
        return max(1, min(capacity // (token * tokens), capacity // (row * rows)))

    if not on_host:
        tokens = call.max_seq_len
        if call.sliding_window is not None and call.causal:
            tokens = min(tokens, call.sliding_window + rows - 1)
        num_pages = min(call.max_pages, -(-tokens // size) + 1)
        step = width(rows, num_pages)
        for start in range(0, len(blocks.row), step):
            yield blocks.select(slice(start, start + step)), _Span(rows, num_pages)
        return

    def bucket(item: tuple[int, int, int]) -> tuple[int, int]:
        return item[0].bit_length(), item[1].bit_length()

    first_page = blocks.low // size
    num_pages = (blocks.high + size - 1) // size - first_page
    sizes = zip(blocks.rows.tolist(), num_pages.tolist(), range(len(blocks.row)), strict=True)
    live = sorted((item for item in sizes if item[0] > 0 and item[1] > 0), key=bucket)
    seen_by_all = blocks.length
    if call.causal:
        seen_by_all = torch.minimum(seen_by_all, blocks.position + 1)
    first_seen = torch.zeros_like(seen_by_all)
    if call.sliding_window is not None:
        first_seen = blocks.position + blocks.rows - call.sliding_window
    origin = first_page * size
    for _, members in itertools.groupby(live, bucket):
        group = list(members)
        step = width(max(item[0] for item in group), max(item[1] for item in group))
        for start in range(0, len(group), step):
            part = group[start : start + step]
            index = torch.tensor([item[2] for item in part])
            visible = (
                int((first_seen - origin)[index].max()),
                int((seen_by_all - origin)[index].min()),
            )
            span = _Span(max(item[0] for item in part), max(item[1] for item in part), visible)
            yield blocks.select(index), span


def _make_blocks(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rows: int,
    call: AttentionCall,
    layout: CacheLayout,
) -> _Blocks:
    """Every block of at most ``rows`` rows, with empty ones up to a number known without data."""
    start = query_start_loc[:-1].long()
    count = query_start_loc.diff().long().clamp_(min=0)
    num_blocks = (count + rows - 1) // rows
    ends = num_blocks.cumsum(0)
    total = (call.num_tokens + call.num_seqs * (rows - 1)) // rows
    number = torch.arange(total, device=seq_lens.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp_(max=call.num_seqs - 1)
    first = (number - (ends - num_blocks)[sequence]) * rows
    count = count[sequence]
    tokens = seq_lens.long()[sequence]
    length = tokens.clamp(0, call.max_pages * layout.page_size)
    block_rows = (count - first).clamp_(0, rows)
    position = tokens - count + first
    high = torch.minimum(length, position + block_rows).clamp_(min=0) if call.causal else length
    low = torch.zeros_like(high)
    if call.sliding_window is not None:
        low = torch.minimum((position - call.sliding_window + 1).clamp_(min=0), high)
    return _Blocks(sequence, start[sequence] + first, block_rows, position, length, low, high)


def _elements_a_token(rows: int, call: AttentionCall, layout: CacheLayout) -> int:
    """Elements of temporaries that a block of ``rows`` rows needs for each token of a tile."""
    return layout.num_kv_heads * max(layout.head_dim, SCORE_COPIES * rows * call.group)


class _Attention:
    """One call: its tensors, and the loop over the tiles of some blocks."""

    def __init__(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        out: Tensor,
        lse: Tensor,
        call: AttentionCall,
        layout: CacheLayout,
        codec: Codec,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> None:
        self.query, self.cache, self.block_table = query, cache, block_table
        self.out, self.lse = out, lse
        self.call, self.layout = call, layout
        self.constants = _reader(codec, query.device)
        self.reader = PageReader(
            layout, self.constants.key_table, self.constants.value_table, query.device
        )
        per_head = (layout.num_kv_heads, 1, call.group)
        self.sinks = None if sinks is None else sinks.view(per_head)
        self.slopes = None if alibi_slopes is None else alibi_slopes.view(per_head)

    def run(self, blocks: _Blocks, span: _Span) -> None:
        """Attends from every row of the blocks and writes its output and LSE."""
        call, layout = self.call, self.layout
        width, rows, dim = len(blocks.row), span.rows, layout.head_dim
        device = self.query.device
        lead = (width, layout.num_kv_heads)
        step = torch.arange(rows, device=device)
        row = blocks.row[:, None] + step  # [W, rows]
        position = blocks.position[:, None] + step
        limit = blocks.length[:, None]
        high = torch.minimum(limit, position + 1) if call.causal else limit.expand_as(position)
        low = torch.zeros_like(high)
        if call.sliding_window is not None:
            low = position - call.sliding_window + 1

        query, bias = self._coded_query(row, lead)
        # The score of row r, head h of a group is in line r * g + h.
        grid = (*lead, rows, call.group)
        lines = (*lead, rows * call.group)
        top = torch.full(lines, -math.inf, device=device, dtype=torch.float32)
        total = torch.zeros_like(top)
        zeros = torch.zeros_like(top)
        mixed = torch.zeros((*lines, dim), device=device, dtype=torch.float32)
        for page, slots, token, masked in self._tiles(blocks, span):
            data = self.reader.gather(self.cache, page)
            levels, scale = self.reader.keys(data, slots)
            score = _matmul(query, levels.flatten(0, 1).mT).view(*lines, -1)
            if scale is not None:
                score *= scale[:, :, None]
            if bias is not None:
                score += bias
            if call.softcap is not None:
                score = score.div_(call.softcap).tanh_().mul_(call.softcap)
            if self.slopes is not None:
                distance = (token[:, None] - position[..., None]).float()  # [W, rows, T]
                view = score.view(*grid, -1)
                view += self.slopes[..., None] * distance[:, None, :, None]
            levels, scale, zero = self.reader.values(data, slots)
            if masked:
                seen = (token[:, None] < high[..., None]) & (token[:, None] >= low[..., None])
                score.view(*grid, -1).masked_fill_(~seen[:, None, :, None], -math.inf)
                # Slots nobody sees may hold anything: 0 * NaN must not happen.
                known = (token < blocks.high[:, None]) & (token >= blocks.low[:, None])
                scale = torch.where(known[:, None], scale, 0)
                zero = None if zero is None else torch.where(known[:, None], zero, 0)
            new_top = torch.maximum(top, score.amax(-1))
            shift = _finite_shift(new_top)
            weight = score.sub_(shift[..., None]).exp_()
            decay = torch.exp(top - shift)
            top = new_top
            total = total * decay + weight.sum(-1)
            if zero is not None:
                zeros = zeros * decay + (weight * zero[:, :, None]).sum(-1)
            weight *= scale[:, :, None]
            mixed *= decay[..., None]
            mixed += _matmul(weight.flatten(0, 1), levels.flatten(0, 1)).view(mixed.shape)
        self._finish(blocks, row, step, grid, top, total, zeros, mixed)

    def _coded_query(self, row: Tensor, lead: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Scaled queries in the basis of the codes ``[W * Hk, rows * g, D]``, and ``q . mu``."""
        constants, call = self.constants, self.call
        query = self.query.index_select(0, row.flatten().clamp(max=call.num_tokens - 1))
        query = query.view(*row.shape, lead[1], call.group, -1).transpose(1, 2)
        query = query.flatten(2, 3).float() * call.scale
        bias = None
        if constants.key_offset is not None:
            bias = (query * constants.key_offset).sum(-1, keepdim=True)
        query = _transform(query, constants.query_matrix)
        if constants.key_scale is not None:
            query = query * constants.key_scale
        return query.flatten(0, 1).contiguous(), bias

    def _tiles(self, blocks: _Blocks, span: _Span) -> Iterator[tuple[Tensor, slice, Tensor, bool]]:
        """Pages ``[W, n]``, slots, tokens ``[W, n * slots]``, and whether a row may not see all."""
        call, layout = self.call, self.layout
        size = layout.page_size
        token_elements = len(blocks.row) * _elements_a_token(span.rows, call, layout)
        tokens = max(16, _tile_elements(self.query.device) // token_elements)
        step = min(span.pages, max(1, tokens // size))
        first = (blocks.low // size)[:, None]
        table_row = blocks.sequence[:, None]
        for start in range(0, span.pages, step):
            number = first + torch.arange(start, start + step, device=first.device)
            entry = self.block_table[table_row, number.clamp(max=call.max_pages - 1)]
            page = torch.where(number * size < blocks.high[:, None], entry, 0)
            for slot in range(0, size, min(size, tokens)):
                slots = slice(slot, min(size, slot + tokens))
                offsets = torch.arange(slots.start, slots.stop, device=first.device)
                token = (number[..., None] * size + offsets).flatten(1)
                yield (
                    page,
                    slots,
                    token,
                    not span.sees(
                        start * size + slots.start, (start + step - 1) * size + slots.stop
                    ),
                )

    def _finish(
        self,
        blocks: _Blocks,
        row: Tensor,
        step: Tensor,
        grid: tuple[int, ...],
        top: Tensor,
        total: Tensor,
        zeros: Tensor,
        mixed: Tensor,
    ) -> None:
        """Normalises, leaves the basis of the codes, and writes the rows."""
        constants = self.constants
        final = top
        if self.sinks is not None:
            sink = self.sinks.expand(grid[1:]).flatten(1)  # [Hk, rows * g]
            final = torch.maximum(top, sink)
        shift = _finite_shift(final)
        decay = torch.exp(top - shift)
        total = total * decay
        everything = total if self.sinks is None else total + torch.exp(sink - shift)
        weight = decay / torch.where(everything == 0, 1, everything)
        result = mixed * weight[..., None]
        result += (zeros * weight)[..., None]
        result = _transform(result, constants.output_matrix)
        if constants.value_offset is not None:
            share = total / torch.where(everything == 0, 1, everything)
            result = result + share[..., None] * constants.value_offset
        lse = torch.log(everything) + shift
        result = result.unflatten(2, grid[2:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        lse = lse.unflatten(2, grid[2:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)

        real = (step < blocks.rows[:, None]).flatten()
        row = row.flatten()
        if row.device.type == "cpu":
            if not bool(real.all()):
                row, result, lse = row[real], result[real], lse[real]
        else:
            row = torch.where(real, row, self.call.num_tokens)
        self.out.index_copy_(0, row, result.to(self.out.dtype))
        self.lse.index_copy_(0, row, lse)


def _finite_shift(top: Tensor) -> Tensor:
    return torch.where(top == -math.inf, 0, top)


# --- dequantize and merge -------------------------------------------------------------------


def dequantize(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See :func:`tq_torch.dequantize`; arguments are checked."""
    device, size = cache.device, layout.page_size
    num_seqs, max_pages = block_table.shape
    shape = (num_seqs * max_pages, size, layout.num_kv_heads, layout.head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    if cache.shape[0]:
        constants = _reader(codec, device)
        reader = PageReader(layout, constants.key_table, constants.value_table, device)
        # Pages in the order of the result, and how many of each one's tokens exist.
        first = torch.arange(max_pages, device=device) * size
        count = (seq_lens.long()[:, None] - first).clamp_(0, size).flatten()
        page = torch.where(count > 0, block_table.flatten(), 0)
        place = torch.arange(len(page), device=device)
        if device.type == "cpu":
            place = count.nonzero().flatten()
        token = layout.num_kv_heads * layout.head_dim
        tokens = max(1, _tile_elements(device) // token)
        parts = place.split(max(1, tokens // size)) if len(place) else ()
        for part in parts:
            data = reader.gather(cache, page[part][None])
            for slot in range(0, size, min(size, tokens)):
                slots = slice(slot, min(size, slot + tokens))
                offsets = torch.arange(slots.start, slots.stop, device=device)
                known = (offsets < count[part][:, None])[..., None, None]
                for result, dense in zip(
                    (keys, values), _dense(reader, data, slots, constants), strict=True
                ):
                    dense = dense.unflatten(2, (len(part), -1))[0].permute(1, 2, 0, 3)
                    dense = torch.where(known, dense, 0).to(dtype)
                    result[:, slots].index_copy_(0, part, dense)
    dense_shape = (num_seqs, max_pages * size, *shape[2:])
    return keys.view(dense_shape), values.view(dense_shape)


def _dense(reader: PageReader, data: Tensor, slots: slice, constants: _Reader) -> Iterator[Tensor]:
    """Keys, then values, float32 ``[1, Hk, T, D]``."""
    keys, scale = reader.keys(data, slots)
    keys = keys * (constants.key_scale if scale is None else scale[..., None])
    keys = _transform(keys, constants.key_matrix)
    yield keys if constants.key_offset is None else keys + constants.key_offset
    values, scale, zero = reader.values(data, slots)
    values = values * scale[..., None]
    if zero is not None:
        values = values + zero[..., None]
    values = _transform(values, constants.output_matrix)
    yield values if constants.value_offset is None else values + constants.value_offset


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`tq_torch.merge_attention_states`; arguments are checked."""
    shift = _finite_shift(torch.maximum(lse_a, lse_b))
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    mixed = weight_a[..., None] * out_a.float() + weight_b[..., None] * out_b.float()
    out = mixed / torch.where(total == 0, 1, total)[..., None]
    return out.to(out_a.dtype), torch.log(total) + shift
