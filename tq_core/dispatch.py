"""Launch plans: which kernels run, with which constants, from plain numbers alone.

A plan is data. Both frameworks ask for it with the same numbers, bind their buffers to it and
launch; nothing here reads an array, an environment variable or a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tq_core import codebook, plans, ptx
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.validation import MAX_KV_SPLITS, AttentionCall

MAX_SCRATCH_BYTES = 64 * 2**20
#: KV splits to choose from: each number is a kernel of its own to compile.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
#: Programs of `attention` a multiprocessor up to which they may start before their query is there.
_EARLY_PROGRAMS = 4
#: Programs of a store, so many that each multiprocessor has several.
_STORE_PROGRAMS = 1024
#: Tiles of a sequence up to which it is not worth cutting.
_FEW_TILES = 32
#: Most sequences whose shares a program computes from their lengths, and most tiles of them all.
_SHARED_SEQS = 1024
_SHARED_TILES = 2**26
#: Where results must not depend on the batch: tokens of a KV split, scratch at most, and splits
#: and coordinates of a program of `merge`.
SPLIT_TOKENS = 1024
MAX_BATCH_SCRATCH_BYTES = 2**30
_BATCH_MERGE = (32, 64)
#: Query rows of a program from which on they lie on the M axis of the dots.
_WIDE = 64
#: Scratch for the tokens of a call that are decoded once.
_UNPACKED_BYTES = 40 * 2**20
#: Shared memory of an attention program besides its tiles: queries, layout changes, the driver's.
_FIXED_SHARED = 4608


@dataclass(frozen=True)
class Device:
    """What a plan depends on.

    Attributes:
        kind: ``"cuda"``, ``"hip"`` or ``"interpret"``.
        capability: compute capability as major * 10 + minor; 0 where it means nothing.
        num_sms: multiprocessors.
        shared_memory: bytes a program may use.
        name: the kind of device, as its maker calls it; measured plans are filed under it.
    """

    kind: str
    capability: int = 0
    num_sms: int = 132
    shared_memory: int = 232448
    name: str = ""


@dataclass(frozen=True)
class Buffer:
    """An array that a launch writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """One kernel launch. The kernel takes inputs, integers and outputs in this order.

    Attributes:
        kernel: a name of ``kernels.KERNELS``.
        grid: programs; nothing runs where there are none.
        inputs: names of arrays: arguments of the public function, ``codec_arrays``, outputs of
            launches before this one.
        integers: numbers that are not compiled into the kernel.
        outputs: what it writes; an output that is an input too is written in place.
        constexprs: numbers that are.
        num_warps, num_stages: as Triton has them.
        pdl: whether the kernel may start while the one before it runs; it waits by itself.
        fp_fusion: whether the compiler may make one operation of a product and a sum.
    """

    kernel: str
    grid: int
    inputs: tuple[str, ...]
    integers: tuple[int, ...]
    outputs: tuple[Buffer, ...]
    constexprs: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    pdl: bool = False
    fp_fusion: bool = True


@dataclass(frozen=True)
class Traits:
    """What the kernels' code depends on of a codec; its numbers are buffers."""

    key_kind: str
    value_kind: str
    key_bias: float
    value_cubic: tuple[float, ...]
    value_factor: float
    value_largest: float
    has_key_matrix: bool
    has_value_matrix: bool
    has_key_transform: bool
    has_value_transform: bool
    has_key_offset: bool
    has_value_offset: bool
    key_matrix_stride: int
    key_parts: int
    key_product_factor: float
    query_low_at: int
    value_matrix_stride: int
    value_parts: int
    value_product_factor: float
    key_offset_stride: int
    value_offset_stride: int
    value_shift_stride: int
    factor_stride: int
    key_scale_stride: int


@dataclass(frozen=True)
class AttentionPlan:
    """Plan of ``attention``.

    Attributes:
        query, pieces, attention, merge: the launches in order; a merge only where needed, and
            ``pieces`` where tokens are decoded once and before: the last of them are in
            ``attention``.
        short, short_merge: attention of sequences with few rows beside some with many.
        output: where outputs leave the values' coded basis.
        num_splits: KV splits, of the long sequences where some are short.
    """

    query: Launch
    attention: Launch
    merge: Launch | None
    short: Launch | None
    short_merge: Launch | None
    output: Launch | None
    num_splits: int
    pieces: tuple[Launch, ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches in order."""
        short = (self.short, self.short_merge)
        steps = (self.query, *self.pieces, self.attention, self.merge, *short, self.output)
        return tuple(step for step in steps if step is not None)


def codec_traits(codec: Codec) -> Traits:
    """The traits of ``codec``."""
    dim, config = codec.head_dim, codec.config

    def stride(array: np.ndarray | None) -> int:
        return 0 if array is None or array.shape[0] == 1 else math.prod(array.shape[1:])

    value_cubic = cubic_of(codec.value_centroids, dim)
    grid = grid_of(codec.centroids, dim)
    key_kind = "fp8" if not config.key_is_codebook else "grid" if grid else "table"
    value_kind = "int" if not config.value_is_codebook else "poly" if value_cubic else "table"
    shift = value_shift_array(codec)
    query = query_matrix_array(codec)
    key_size, value_size = _magnitude(codec.key_matrix), _magnitude(codec.value_matrix)
    factor = 2.0**24
    if codec.value_centroids is not None:
        factor = value_decode_factor(codec.value_centroids, dim)
    return Traits(
        key_kind=key_kind,
        value_kind=value_kind,
        key_bias=grid.offset if grid else 0.0,
        value_cubic=value_cubic,
        value_factor=factor,
        value_largest=_largest_code(codec),
        has_key_matrix=codec.has_key_matrix,
        has_value_matrix=codec.has_value_matrix,
        has_key_transform=codec.key_transform is not None,
        has_value_transform=codec.value_transform is not None,
        has_key_offset=codec.key_offset is not None,
        has_value_offset=codec.value_offset is not None,
        key_matrix_stride=stride(codec.key_matrix),
        key_parts=(1 if key_size else 3) if codec.has_key_matrix else 0,
        key_product_factor=key_size or 1.0,
        query_low_at=query[0].size if len(query) == 2 else 0,
        value_matrix_stride=stride(codec.value_matrix),
        value_parts=(1 if value_size else 3) if codec.has_value_matrix else 0,
        value_product_factor=value_size or 1.0,
        key_offset_stride=stride(codec.key_offset),
        value_offset_stride=stride(codec.value_offset),
        value_shift_stride=stride(shift),
        factor_stride=stride(factor_array(codec)),
        key_scale_stride=stride(codec.key_scale),
    )


def _largest_code(codec: Codec) -> float:
    """Of values, over their scale: the largest code, or a bound of the centroids."""
    if codec.value_centroids is None:
        return float(2**codec.config.value_bits - 1)
    return 1.01 * float(np.abs(codec.value_centroids).max())


def grid_of(centroids: np.ndarray | None, head_dim: int) -> codebook.Grid | None:
    """The grid whose levels these centroids of keys are, if any."""
    if centroids is None:
        return None
    bits = int(math.log2(len(centroids)))
    if bits not in codebook.GRIDS:
        return None
    if not np.array_equal(centroids, codebook.default_centroids(bits, head_dim)):
        return None
    return codebook.GRIDS[bits]


def cubic_of(centroids: np.ndarray | None, head_dim: int) -> tuple[float, ...]:
    """Coefficients of the cubic whose levels these centroids of values are, () if of none."""
    if centroids is None:
        return ()
    bits = int(math.log2(len(centroids)))
    if bits not in codebook.CUBICS:
        return ()
    if not np.array_equal(centroids, codebook.default_value_centroids(bits, head_dim)):
        return ()
    return codebook.CUBICS[bits].coefficients


def _table_factor(centroids: np.ndarray) -> float:
    """What an entry of a decode table is multiplied by to give a centroid."""
    # Entries of the table lie within +-4, well inside fp16.
    return float(np.abs(centroids).max()) / 4


def key_decode_factor(centroids: np.ndarray, head_dim: int) -> float:
    """What a decoded number of a key is multiplied by to give a centroid."""
    grid = grid_of(centroids, head_dim)
    return grid.scale / math.sqrt(head_dim) if grid else _table_factor(centroids)


def value_decode_factor(centroids: np.ndarray, head_dim: int) -> float:
    """What a decoded number of a value is multiplied by to give a centroid."""
    if cubic_of(centroids, head_dim):
        return codebook.CUBICS[int(math.log2(len(centroids)))].scale / math.sqrt(head_dim)
    return _table_factor(centroids)


def table_array(centroids: np.ndarray | None, factor: float) -> np.ndarray:
    """The fp16 decode table of a codebook, one unused entry without a codebook."""
    if centroids is None:
        return np.zeros(1, np.float16)
    table: np.ndarray = (centroids.astype(np.float64) / factor).astype(np.float16)
    return table


def grid_array(centroids: np.ndarray | None, head_dim: int) -> np.ndarray:
    """A grid codebook as ``kernels.codes`` reads it: words and 2**16, four times each; entries."""
    grid = grid_of(centroids, head_dim)
    if centroids is None or grid is None:
        return np.zeros(1, np.int32)
    entries = codebook.grid_levels(int(math.log2(len(centroids)))) + grid.offset
    words = entries.astype(np.int8).view(np.int32)
    words = np.append(words, np.int32(2**16))
    return np.concatenate([np.repeat(words, 4), entries.astype(np.int32)])


def phase_array() -> np.ndarray:
    """Where unit u of 48 bits begins in a word, 0 or 16; int32 ``[64]``."""
    return np.arange(64, dtype=np.int32) % 2 * 16


def _query_largest(codec: Codec) -> np.ndarray:
    """The largest entry of each head's query matrix; fp64 ``[1 or Hk]``."""
    largest: np.ndarray = np.abs(codec.query_matrix.astype(np.float64)).max((-2, -1))
    return np.where(largest == 0, 1.0, largest)


def query_matrix_array(codec: Codec) -> np.ndarray:
    """The query matrix over its largest entry; fp16 ``[1 or 2, 1 or Hk, D, D]``.

    A second part, where fp16 needs one, is 2048 times what the first lacks.
    """
    matrix = codec.query_matrix / _query_largest(codec)[:, None, None]
    high = matrix.astype(np.float16)
    low = ((matrix - high) * 2048).astype(np.float16)
    return np.stack([high, low] if low.any() else [high])


def key_factor_array(codec: Codec) -> np.ndarray:
    """What turns a decoded number into a key, but for the token's scale; fp32 ``[1 or Hk]``."""
    decoded = 256.0
    if codec.centroids is not None:
        decoded = key_decode_factor(codec.centroids, codec.head_dim)
    return (decoded * codec.key_scale.astype(np.float64)).astype(np.float32)


def factor_array(codec: Codec) -> np.ndarray:
    """Factor of ``q' . c``: the key's times the query matrix's; fp32 ``[1 or Hk]``."""
    return (key_factor_array(codec) * _query_largest(codec)).astype(np.float32)


def value_shift_array(codec: Codec) -> np.ndarray | None:
    """The value offset in the values' coded basis; fp32 ``[1 or Hk, D]``."""
    if codec.value_offset is None or not codec.has_value_matrix:
        return codec.value_offset
    matrix = codec.value_matrix.astype(np.float64)
    return (matrix @ codec.value_offset[..., None]).astype(np.float32)[..., 0]


def _magnitude(matrix: np.ndarray) -> float:
    """That of all entries, as a signed Hadamard matrix has it; 0 where they differ."""
    size = np.abs(matrix)
    return float(size.flat[0]) if bool((size == size.flat[0]).all()) else 0.0


def store_matrix(matrix: np.ndarray) -> np.ndarray:
    """A matrix as ``store`` has it: bits of bf16 parts, int16 ``[1 or 3, 1 or Hk, D, D]``.

    They add up to the matrix or, where all entries have one magnitude, are one part of signs.
    """
    if _magnitude(matrix):
        return _bf16_bits(np.sign(matrix))[None]
    parts, rest = [], matrix.astype(np.float64)
    for _ in range(3):
        parts.append(_bf16_bits(rest))
        rest = rest - _from_bf16(parts[-1])
    return np.stack(parts)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    """bf16 bits of ``x``, toward zero, int16."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def codec_arrays(codec: Codec) -> dict[str, np.ndarray]:
    """A codec's numbers as the kernels read them; one unused number where it has none."""
    nothing = np.zeros(1, np.float32)
    shift = value_shift_array(codec)
    arrays = {
        "key_matrix": store_matrix(codec.key_matrix),
        "query_matrix": query_matrix_array(codec),
        "key_inverse": codec.query_matrix,
        "value_matrix": store_matrix(codec.value_matrix),
        "output_matrix": codec.output_matrix,
        "value_inverse": codec.output_matrix.swapaxes(1, 2),
        "factor": factor_array(codec),
        "key_factor": key_factor_array(codec),
        "key_scale": codec.key_scale,
        "key_offset": nothing if codec.key_offset is None else codec.key_offset,
        "value_offset": nothing if codec.value_offset is None else codec.value_offset,
        "value_shift": nothing if shift is None else shift,
        "key_grid": grid_array(codec.centroids, codec.head_dim),
        "phase": phase_array(),
    }
    for side, levels in (("key", codec.centroids), ("value", codec.value_centroids)):
        make = key_decode_factor if side == "key" else value_decode_factor
        factor = 1.0 if levels is None else make(levels, codec.head_dim)
        arrays[f"{side}_table"] = table_array(levels, factor)
        arrays[f"{side}_levels"] = nothing if levels is None else levels
        arrays[f"{side}_edges"] = nothing if levels is None else codebook.midpoints(levels)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _page_constexprs(layout: CacheLayout, page_stride: int) -> dict[str, Any]:
    """Strides of a page in bytes, as docs/format.md defines them."""
    p, heads = layout.page_size, layout.num_kv_heads
    key, value, both = layout.key_bytes, layout.value_bytes, layout.code_bytes
    fields = layout.num_meta_fields
    value_fields = 1 if layout.config.value_is_codebook else 2
    planes = layout.order == "planes"
    if layout.order == "token":
        head_stride, key_slot, value_base, value_slot = both, heads * both, key, heads * both
    elif layout.order == "head":
        head_stride, key_slot, value_base, value_slot = p * both, both, key, both
    else:
        head_stride, key_slot, value_base, value_slot = p * both, key, p * key, value
    return {
        "PAGE_SIZE": p,
        "PAGE_STRIDE": page_stride,
        "KEY_HEAD_STRIDE": head_stride,
        "KEY_SLOT_STRIDE": key_slot,
        "VALUE_BASE": value_base,
        "VALUE_HEAD_STRIDE": head_stride,
        "VALUE_SLOT_STRIDE": value_slot,
        "VALUE_WORD_MAJOR": planes,
        "VALUE_WHOLE": value - value % 4 if planes else value,
        "VALUE_TAIL": value % 4 if planes else 0,
        "META_BASE": layout.meta_offset,
        "META_HEAD_STRIDE": 2 * fields * p,
        "META_VALUE": 2 * (fields - value_fields) * p,
        "META_PAIRS": planes and value_fields == 2,
    }


def _reader_constexprs(
    layout: CacheLayout,
    page: Mapping[str, Any],
    traits: Traits,
    align: int,
    *,
    wide: bool,
    asm: bool,
) -> dict[str, Any]:
    """How codes are read: units, elements, blocks, decoders.

    ``wide``: values in the widest units, for matrices whose rows are values.
    """
    dim, config = layout.head_dim, layout.config
    key_strides = (page["PAGE_STRIDE"], page["KEY_HEAD_STRIDE"], page["KEY_SLOT_STRIDE"], align)
    grid = traits.key_kind == "grid"
    if grid:
        # Three words of 32 codes, or one.
        key_unit = 12 if config.key_bits == 3 else 4
        ends = [layout.key_bytes] + [dim // 4] * (config.key_packing == "planar")
        key_element = 1 if any(n % 4 for n in (*key_strides, *ends)) else 4
    elif config.key == "mse3" and config.key_packing == "dense":
        key_unit, key_element = 3, 1
    else:
        key_unit = 2
        key_element = 1 if any(n % 2 for n in key_strides) else 2
    if grid:
        key_codes = 8 * key_unit // config.key_bits
    else:
        key_codes = {"fp8": 2, "mse4": 4}.get(config.key, 8)

    value_strides = (
        page["PAGE_STRIDE"],
        page["VALUE_HEAD_STRIDE"],
        page["VALUE_BASE"],
        0 if page["VALUE_WORD_MAJOR"] else page["VALUE_SLOT_STRIDE"],
        align,
    )
    bits = config.value_bits
    tail = page["VALUE_TAIL"]
    whole_words = layout.value_bytes % 4 == 0 and not tail
    if bits == 3:
        halves = wide and whole_words and not any(n % 4 for n in value_strides)
        value_unit, value_element = 6 if halves else 3, 4
    else:
        value_unit = value_element = 4 if whole_words and (wide or dim * bits >= 512) else 2
    if any(n % value_element for n in (*value_strides, tail)):
        value_element = 1
    value_codes = 8 * value_unit // bits
    pair = page["META_PAIRS"] and not any(
        n % 4
        for n in (
            page["PAGE_STRIDE"],
            page["META_BASE"] + page["META_VALUE"],
            page["META_HEAD_STRIDE"],
            align,
        )
    )
    key_asm = value_asm = ("", "")
    if asm:
        if grid:
            key_asm = ptx.grid_asm(config.key_bits, config.key_packing)
        elif config.key_packing == "dense":
            key_asm = ptx.decode_asm(traits.key_kind, config.key_bits, key_unit)
        value_asm = ptx.decode_asm(traits.value_kind, bits, value_unit, traits.value_cubic)
    num_key, num_value = (-(-dim // codes) for codes in (key_codes, value_codes))
    # The matrix unit has 16 rows: eight units are two codes of each in one matrix.
    paired = wide and value_unit >= 4 and num_value <= 8
    key_pair = layout.page_size % 2 == 0 and not any(
        n % 4 for n in (page["PAGE_STRIDE"], page["META_BASE"], page["META_HEAD_STRIDE"], align)
    )
    return {
        "META_PAIR_LOAD": bool(pair),
        "KEY_PAIR_LOAD": key_pair and config.key_is_codebook,
        "KEY_KIND": traits.key_kind,
        "KEY_BITS": config.key_bits,
        "KEY_UNIT": key_unit,
        "KEY_ELEMENT": key_element,
        "KEY_CODES": key_codes,
        "KEY_PLANAR": config.key_packing == "planar",
        "KEY_BYTES": layout.key_bytes,
        "KEY_BIAS": traits.key_bias,
        "KEY_ASM": key_asm[0],
        "KEY_CONSTRAINTS": key_asm[1],
        "VALUE_KIND": traits.value_kind,
        "VALUE_BITS": bits,
        "VALUE_UNIT": value_unit,
        "VALUE_ELEMENT": value_element,
        "VALUE_CODES": value_codes,
        "VALUE_PAIRED": paired,
        "VALUE_FACTOR": traits.value_factor,
        "VALUE_CUBIC": traits.value_cubic,
        "VALUE_ASM": value_asm[0],
        "VALUE_CONSTRAINTS": value_asm[1],
        "HEAD_DIM": dim,
        "NUM_KEY": num_key,
        "NUM_VALUE": num_value,
        "BLOCK_KEY": max(4 if grid else 16, _pow2(num_key)),
        "BLOCK_VALUE": max(8 if paired else 16, _pow2(num_value)),
    }


#: Numbers that a plan may be overridden with, and the least and largest value.
_LIMITS = {
    "block_n": (4, 256),
    "block_t": (16, 256),
    "num_warps": (1, 16),
    "num_stages": (1, 8),
    "num_splits": (1, MAX_KV_SPLITS),
    "parts": (1, 2**16),
    "split_tokens": (16, 2**20),
    "asm": (0, 1),
    "early": (0, 1),
    "unpack": (0, 1),
    "piece_tokens": (32, 2**20),
}


def _overrides(given: Mapping[str, int | str] | None) -> tuple[dict[str, int], bool]:
    """Checked overrides of a plan, and whether results must not depend on the batch."""
    over: dict[str, int] = {}
    deterministic: int | str | None = None
    known = sorted([*_LIMITS, "deterministic"])
    if unknown := sorted(set(given or {}) - set(known)):
        raise ValueError(f"plan: expected any of {known}, got {unknown}")
    for name, value in (given or {}).items():
        if name == "deterministic":
            deterministic = value
            continue
        low, high = _LIMITS[name]
        power = name in ("block_n", "block_t", "num_warps")
        if isinstance(value, str) or not low <= value <= high or (power and value != _pow2(value)):
            what = "a power of two" if power else "a number"
            raise ValueError(
                f"plan: expected {name} to be {what} from {low} to {high}, got {value!r}"
            )
        over[name] = value
    if deterministic not in (None, "batch"):
        raise ValueError(f"plan: expected deterministic to be 'batch', got {deterministic!r}")
    if deterministic is None and "split_tokens" in over:
        raise ValueError("plan: split_tokens is for deterministic='batch' alone")
    return over, deterministic is not None


def _shared(reader: Mapping[str, Any], block_n: int, block_t: int, stages: int) -> int:
    """Estimate of the shared memory of an attention program, in bytes."""
    tiles = max(1, (stages - 1) // 2) * block_t * _token_bytes(reader)
    if block_n < _WIDE:
        return tiles + _FIXED_SHARED
    # Query rows, and a tile's decoded keys and values.
    key = reader["BLOCK_KEY"] * reader["KEY_CODES"]
    value = reader["BLOCK_VALUE"] * reader["VALUE_CODES"]
    key_size = 1 if reader["KEY_KIND"] == "grid" else 2
    return tiles + 2 * block_n * key + block_t * (key_size * key + 2 * value) + _FIXED_SHARED


def _token_bytes(reader: Mapping[str, Any]) -> int:
    """Bytes of shared memory that a token of a tile takes, codes and scales."""
    key = reader["BLOCK_KEY"] * reader["KEY_UNIT"]
    value = reader["BLOCK_VALUE"] * (8 if reader["VALUE_UNIT"] == 6 else reader["VALUE_UNIT"])
    return int(key + value + 6)


def _is_prefetched(page: Mapping[str, Any], layout: CacheLayout, block_t: int, align: int) -> bool:
    """Whether the bytes of a head in whole pages of a tile can be asked for by 32 lanes."""
    pages = block_t // layout.page_size
    if block_t % layout.page_size or pages > 32 or not page["VALUE_WORD_MAJOR"]:
        return False
    lanes = 32 // pages
    numbers = (page["PAGE_STRIDE"], page["META_BASE"], page["META_HEAD_STRIDE"], align)
    return page["KEY_HEAD_STRIDE"] % (16 * lanes) == 0 and not any(n % 16 for n in numbers)


def _items(**constexprs: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(constexprs.items())


def _precision(device: Device) -> str:
    """How a dot of fp32 operands is done where the result need not match bit for bit."""
    return "tf32x3" if device.kind == "cuda" else "ieee"


def _tile_time(programs: float, num_sms: int) -> float:
    """Time of a tile while a multiprocessor has its share of ``programs``; a lone one's is 1.

    A few programs wait for memory side by side; from about four on they share the arithmetic.
    """
    return float((1 + (0.27 * programs / num_sms) ** 3) ** (1 / 3))


def _splits(programs: int, tiles: int, num_sms: int, slots: int, most: int) -> int:
    """KV splits that take the least time, as few as reach that.

    Args:
        programs: of one split.
        tiles: of a program of one split.
        num_sms: multiprocessors.
        slots: programs that are resident at once.
        most: splits at most.
    """
    best, best_time = 1, math.inf
    for splits in SPLITS:
        if splits > most:
            break
        waves, rest = divmod(programs * splits, slots)
        # Starting and ending takes about a tile, merging about two and some for each split.
        length = -(-tiles // splits) + 1
        time = length * waves * _tile_time(slots, num_sms)
        if rest:
            time += length * _tile_time(rest, num_sms)
        if splits > 1:
            time += 2 + 0.012 * splits
        if time < best_time * 0.98:
            best, best_time = splits, time
    return best


def _measured(
    call: AttentionCall, layout: CacheLayout, traits: Traits, device: Device
) -> dict[str, int]:
    """Overrides of a decode plan that were measured on this kind of device, if any."""
    foreign = "table" in (traits.key_kind, traits.value_kind)
    if not device.name or foreign:
        return {}
    config, programs = layout.config, call.num_seqs * layout.num_kv_heads
    kind = plans.Kind(config.key, config.value, layout.head_dim, call.group)
    tokens = min(call.max_seq_len, call.sliding_window or call.max_seq_len)
    point = plans.nearest(device.name, kind, programs, tokens)
    if point is None:
        return {}
    over = dict(point.plan)
    wanted = over.pop("num_splits", 0) * point.programs / max(programs, 1)
    if wanted and call.num_kv_splits is None:
        # As many programs as were measured, each with a tile at least.
        rows = call.num_tokens * call.num_query_heads
        most = _most_splits(call, layout, over.get("block_t", 64), rows)
        over["num_splits"] = max(n for n in SPLITS if n == 1 or n <= min(wanted, most))
    return over


class _Tile(NamedTuple):
    """Rows and tokens of an attention program's tiles, and how it runs."""

    block_n: int
    block_t: int
    warps: int
    stages: int
    resident: int


def _tile(
    columns: int, reader: Mapping[str, Any], dim: int, device: Device, over: Mapping[str, int]
) -> _Tile:
    """The tile for sequences of ``columns`` query rows, those of all heads of a group."""
    limit = device.shared_memory
    width = max(16, _pow2(dim))
    block_n = over.get("block_n", min(max(4, _pow2(columns)), 32 if width <= 128 else 16))
    # Elsewhere there is no `wgmma`, and as many instructions either way.
    has_wgmma = device.kind == "interpret" or device.capability == 90
    if "block_n" not in over and width <= 256 and has_wgmma:
        wide = [n for n in (64, 128) if n <= columns and _shared(reader, n, 32, 2) <= limit]
        block_n = max(block_n, *wide) if wide else block_n
    size = max(8, block_n) * width
    warps = 1 if size <= 2048 else 2 if size <= 4096 else 4 if size <= 8192 else 8
    warps = over.get("num_warps", warps)
    resident = max(1, 8 // warps)  # programs a multiprocessor has registers for
    block_t = over.get("block_t", 64 if width <= 128 else 32 if width <= 256 else 16)
    while "block_t" not in over and block_t > 16 and _shared(reader, block_n, block_t, 2) > limit:
        block_t //= 2
    # Two look-ups, of a page and then of its bytes, take two stages each before a second tile is
    # on its way. Where two tiles of all resident programs do not fit, one is better.
    deep = resident * _shared(reader, block_n, block_t, 5) <= limit
    stages = over.get("num_stages", 5 if deep else 2)
    if (shared := _shared(reader, block_n, block_t, stages)) > limit:
        raise ValueError(
            f"plan: block_n={block_n}, block_t={block_t} and num_stages={stages} need about "
            f"{shared} bytes of shared memory, a program has {limit} here"
        )
    return _Tile(block_n, block_t, warps, stages, resident)


def _short_columns(call: AttentionCall) -> int:
    """Query rows of the short sequences of a batch that may have short and long ones, else 0.

    Lengths are not known here. If one sequence has as many rows as any may have, the others have
    these on average; a few rows each are drafts of speculative decoding.
    """
    if call.num_seqs < 2 or call.num_tokens >= call.num_seqs * call.max_query_len:
        return 0
    rows = (call.num_tokens - call.max_query_len) / (call.num_seqs - 1)
    if call.max_query_len >= call.num_tokens:
        rows = call.num_tokens / call.num_seqs
    return call.group * (8 if 1 < rows <= 8 else 1)


def _most_splits(call: AttentionCall, layout: CacheLayout, block_t: int, rows: int) -> int:
    """KV splits that give each a tile and whose partial sums of ``rows`` are not too large."""
    tiles = -(-call.max_seq_len // block_t)
    return max(1, min(tiles, MAX_SCRATCH_BYTES // max(1, 4 * layout.head_dim * rows)))


def _num_splits(
    call: AttentionCall,
    layout: CacheLayout,
    device: Device,
    tile: _Tile,
    over: Mapping[str, int],
    programs: int,
    rows: int,
) -> int:
    """KV splits of a launch of so many programs a split."""
    splits = over.get("num_splits", call.num_kv_splits)
    if splits is not None:
        return splits
    span = call.max_seq_len
    if call.sliding_window is not None and call.causal:
        span = min(span, call.sliding_window + -(-tile.block_n // call.group))
    tiles = max(1, -(-span // tile.block_t))
    most = min(tiles, _most_splits(call, layout, tile.block_t, rows))
    slots = device.num_sms * tile.resident
    return _splits(max(1, programs), tiles, device.num_sms, slots, most)


def _num_parts(
    call: AttentionCall, tile: _Tile, device: Device, splits: int, programs: int, part_bytes: int
) -> int:
    """Programs that share all sequences, where these may differ in length.

    Args:
        call, tile, device: as in `plan_attention`.
        splits: of each sequence, were they equal.
        programs, part_bytes: of a part, and of its partial sums.

    Returns:
        as many as ``splits`` are for all; 0 where each sequence has ``splits``, as few programs
        do: finding their shares takes them time.
    """
    longest = -(-call.max_seq_len // tile.block_t)
    parts = splits * call.num_seqs
    few_tiles = splits == 1 and longest <= _FEW_TILES
    few_programs = programs * parts <= _EARLY_PROGRAMS * device.num_sms
    too_many = parts + call.num_seqs > MAX_SCRATCH_BYTES // part_bytes
    if call.num_seqs < 2 or few_tiles or few_programs or too_many:
        return 0
    return parts


class _Pieces(NamedTuple):
    """How a call decodes its tokens once: tokens of a piece, and number of pieces at most."""

    tokens: int
    number: int


def _pieces(
    call: AttentionCall, layout: CacheLayout, over: Mapping[str, int], width: int
) -> _Pieces | None:
    """The pieces of a call whose tokens are decoded once, None where each program decodes.

    ``width``: columns of a token's decoded key and value.
    """
    if "piece_tokens" in over and not over.get("unpack"):
        raise ValueError("plan: piece_tokens is for unpack=1 alone")
    if not over.get("unpack") or not (call.num_tokens and call.num_seqs and call.max_seq_len):
        return None
    tile = max(32, over.get("block_t", 128))
    most = _UNPACKED_BYTES // (2 * width * layout.num_kv_heads * call.num_seqs)
    tokens = max(tile, min(most // tile, -(-call.max_seq_len // tile)) * tile)
    if call.dtype != "bfloat16":
        raise ValueError(
            "plan: unpack=1 rounds keys, values and queries to fp16, which is not precise enough "
            f"for {call.dtype}"
        )
    tokens = over.get("piece_tokens", tokens)
    if tokens % tile:
        raise ValueError(f"plan: expected piece_tokens to be a multiple of {tile}, got {tokens}")
    return _Pieces(tokens, -(-call.max_seq_len // tokens))


def plan_attention(
    call: AttentionCall,
    layout: CacheLayout,
    traits: Traits,
    device: Device,
    *,
    decode: bool,
    page_stride: int,
    table_stride: int,
    query_strides: tuple[int, int, int],
    out_strides: tuple[int, int, int],
    cache_align: int,
    has_sinks: bool,
    has_alibi: bool,
    overrides: Mapping[str, int | str] | None = None,
) -> AttentionPlan:
    """Plans an attention call.

    Args:
        call: the checked call.
        layout, traits: the cache and its codec.
        device: where it runs.
        decode: one query row a sequence, row b of sequence b.
        page_stride: bytes from a page to the next.
        table_stride: entries from a row of the block table to the next.
        query_strides, out_strides: of ``[N, Hq, D]`` in elements.
        cache_align: a power of two that divides the cache's address.
        has_sinks, has_alibi: whether these arrays are given.
        overrides: any of ``block_n`` (query columns a program), ``block_t`` (tokens a tile),
            ``num_warps``, ``num_stages``, ``num_splits``, ``asm`` (0: no inline PTX), ``early``
            (whether kernels let the next one start early), ``unpack`` (whether tokens are decoded
            once, to a scratch, before they are attended) and ``piece_tokens`` (of that scratch);
            ``parts``: programs that share all sequences together by their lengths, for each block
            of a head, where each sequence has one block of rows: by default as many as equal splits
            would have, where those are many.
            ``deterministic="batch"``: the bits of a row's result depend on its own sequence alone;
            KV splits then have ``split_tokens`` each, and the other overrides are a part of what
            fixes the bits.

    Raises:
        ValueError: an override that no kernel can run, or that says something else than another.
    """
    over, batch = _overrides(overrides)
    equal = "num_splits" in over or call.num_kv_splits is not None
    if decode and not over and not batch:
        over = _measured(call, layout, traits, device)
    page = _page_constexprs(layout, page_stride)
    asm = device.kind == "cuda" and bool(over.get("asm", True))
    reader = _reader_constexprs(layout, page, traits, cache_align, wide=True, asm=asm)
    dim, heads, group = layout.head_dim, layout.num_kv_heads, call.group
    columns = (1 if decode else max(call.max_query_len, 1)) * group
    if batch:
        # What a tile is follows from the head and the device alone.
        columns = group
    tile = _tile(columns, reader, dim, device, over)
    one_kind = decode or batch or "block_n" in over or bool(over.get("unpack"))
    short_columns = 0 if one_kind else _short_columns(call)
    short_tile = _tile(short_columns, reader, dim, device, over) if short_columns else tile
    mixed = short_tile.block_n < tile.block_n

    if decode:
        num_blocks = call.num_seqs * -(-group // tile.block_n)
    elif not call.num_tokens:
        num_blocks = 0
    else:
        num_blocks = call.num_tokens * group // tile.block_n + call.num_seqs + 1
    live_blocks = min(num_blocks, call.num_seqs * -(-columns // tile.block_n))
    if mixed:
        live_blocks = min(num_blocks, -(-call.num_tokens * group // tile.block_n))
    rows = call.num_tokens * call.num_query_heads
    split_tiles = 0
    if batch:
        split_tiles = _split_tiles(call, over, tile.block_t)
        splits = _batch_splits(call, dim, split_tiles * tile.block_t, rows)
    else:
        splits = _num_splits(call, layout, device, tile, over, live_blocks * heads, rows)
    short_splits = 1
    if mixed:
        short_rows = call.num_seqs * heads * short_tile.block_n
        short_splits = _num_splits(
            call, layout, device, short_tile, over, call.num_seqs * heads, short_rows
        )

    coded = traits.has_value_matrix
    parts, block_b = 0, 0
    # Partial sums of a part: of all heads of a row, or of all blocks of a sequence's rows.
    part_rows = call.num_query_heads if decode else heads * tile.block_n
    blocks = -(-group // tile.block_n) if decode else 1
    one_block = not mixed and (decode or columns <= tile.block_n)
    can_share = one_block and not (batch or equal) and 1 <= call.num_seqs <= _SHARED_SEQS
    can_share = can_share and call.num_seqs * (call.max_seq_len // tile.block_t + 3) < _SHARED_TILES
    if "parts" in over:
        if not can_share:
            raise ValueError(
                f"plan: parts is for 1 to {_SHARED_SEQS} sequences of a block of rows each, "
                "without a number of splits of each or deterministic='batch'"
            )
        parts = over["parts"]
    elif can_share and not over.get("unpack") and tile.block_n < _WIDE:
        parts = _num_parts(call, tile, device, splits, heads * blocks, 4 * part_rows * dim)
    if parts:
        block_b = next(n for n in (64, 256, _SHARED_SEQS) if n >= call.num_seqs)
        num_blocks = blocks
    partial = splits > 1 or batch or parts > 0
    pdl = device.kind == "cuda" and device.capability >= 90
    # Where few programs wait, they leave those before them the room they need. With 16 query rows
    # a program (and four times the programs of `merge`) that was slower throughout.
    attention_grid = num_blocks * heads * (parts or splits)
    few_programs = attention_grid <= _EARLY_PROGRAMS * device.num_sms
    few_programs = few_programs and tile.block_n <= 8
    early = pdl and not mixed and bool(over.get("early", partial and few_programs))
    coded_strides = (call.num_query_heads * dim, dim, 1)
    final_strides = coded_strides if coded else out_strides
    rows_shape = (call.num_tokens, call.num_query_heads)
    row_terms = Buffer(
        "row_terms", (2, *rows_shape) if traits.has_key_offset else rows_shape, "float32"
    )
    out, lse = Buffer("out", (*rows_shape, dim), call.dtype), Buffer("lse", rows_shape, "float32")
    # Outputs in the values' coded basis, then sums and states of the splits.
    final = Buffer("coded", (rows, dim), "float32") if coded else out
    result, state = final, lse
    if partial:
        shape = (rows, splits)
        state_shape = shape
        if parts:
            # One more for each sequence that a program begins besides its first.
            shape = (parts + call.num_seqs, part_rows)
            # Behind them, where the parts of each token's rows are.
            state_shape = (shape[0] + -(-call.num_tokens // part_rows), part_rows)
        result = Buffer("partial", (*shape, dim), "float32")
        state = Buffer("state", (*state_shape, 2), "float32")
    # Where sequences of one part write; elsewhere nothing does.
    direct = final if parts else Buffer("direct", (1,), final.dtype)
    direct_lse = lse if parts else Buffer("direct_lse", (1,), "float32")
    # An array that a kernel has no use for is one that is there anyway.
    sinks, slopes = (
        "sinks" if has_sinks else "row_terms",
        "alibi_slopes" if has_alibi else "row_terms",
    )
    constexprs = {
        "DECODE": decode,
        "ONE_BLOCK": False,
        "SHORT": short_tile.block_n if mixed else 0,
        "PARTIAL": partial,
        "PDL": pdl,
        "EARLY": early and (partial or coded),
        "NUM_QUERY_HEADS": call.num_query_heads,
        "NUM_KV_HEADS": heads,
        "GROUP": group,
        "OUT_STRIDE_N": final_strides[0],
        "OUT_STRIDE_H": final_strides[1],
        "OUT_STRIDE_D": final_strides[2],
        "HAS_SINKS": has_sinks and (parts > 0 or not partial),
        "HAS_VALUE_SHIFT": traits.has_value_offset,
        "SHIFT_STRIDE": traits.value_shift_stride,
        "SCALE": call.scale,
        "SOFTCAP": call.softcap or 0.0,
        "HAS_OFFSET": traits.has_key_offset,
        "HAS_ALIBI": has_alibi,
        "CAUSAL": call.causal,
        "WINDOW": call.sliding_window or 0,
        "BLOCK_T": tile.block_t,
        "BLOCK_N": tile.block_n,
        "WIDE": tile.block_n >= _WIDE,
        "SPLIT_TILES": split_tiles,
        "BLOCK_B": block_b,
        "PREFETCH": early and not parts and _is_prefetched(page, layout, tile.block_t, cache_align),
        **page,
        **reader,
    }
    block_d = max(16, _pow2(dim))
    row_blocks = -(-call.num_tokens * group // 16)
    # Few rows: narrow blocks, so that every multiprocessor has one.
    few = batch or row_blocks * heads < 4 * device.num_sms
    block_o = min(block_d, 64 if few else 128)
    transform = {
        "NUM_QUERY_HEADS": call.num_query_heads,
        "NUM_KV_HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_N": 16,
        "PDL": pdl,
    }
    unpacked = _unpacked_reader(layout, page, traits, cache_align)
    width = sum(unpacked[f"BLOCK_{x}"] * unpacked[f"{x}_CODES"] for x in ("KEY", "VALUE"))
    if over.get("unpack") and (decode or batch or "num_splits" in over or parts):
        raise ValueError(
            "plan: unpack=1 is for attention() alone, without KV splits or deterministic='batch'"
        )
    pieces = _pieces(call, layout, over, width)
    if pieces:
        splits, partial, early = 1, False, False
        result, state = final, lse
    integer = traits.key_kind == "grid" and not pieces
    num_out = reader["BLOCK_KEY"] * reader["KEY_CODES"] if integer else dim
    query_o = min(num_out, 256) if integer else block_o
    rotated = Buffer("rotated", (*rows_shape, dim), "float16")
    if integer:
        rotated = Buffer("rotated", (*rows_shape, 2, num_out), "int8")
    query = Launch(
        "transform_query",
        row_blocks * heads * (1 if integer else -(-dim // block_o)),
        inputs=("query", "query_matrix", "factor", "key_offset"),
        integers=(call.num_tokens,),
        outputs=(rotated, row_terms),
        constexprs=_items(
            **transform,
            BLOCK_K=min(block_d, 128),
            BLOCK_O=query_o,
            NUM_OUT=num_out,
            BLOCK_KEY=reader["BLOCK_KEY"],
            KEY_CODES=reader["KEY_CODES"],
            KEY_STRIDED=reader["KEY_BITS"] == 2 or reader["KEY_PLANAR"],
            LOW_AT=traits.query_low_at,
            INTEGER=integer,
            STRIDE_N=query_strides[0],
            STRIDE_H=query_strides[1],
            STRIDE_D=query_strides[2],
            HAS_MATRIX=traits.has_key_matrix,
            MATRIX_STRIDE=traits.key_matrix_stride,
            FACTOR_STRIDE=traits.factor_stride,
            HAS_OFFSET=traits.has_key_offset,
            OFFSET_STRIDE=traits.key_offset_stride,
            BLOCK_D=block_d,
            EARLY=early,
        ),
        num_warps=8 if query_o > 128 else 4,
        num_stages=1,
        pdl=pdl,
    )
    attention = Launch(
        "attention",
        attention_grid,
        inputs=(
            "rotated", "row_terms", "cache", "block_table", "seq_lens",
            "seq_lens" if decode else "query_start_loc",
            "key_grid" if integer else "key_table", "value_table", "phase", "value_shift",
            sinks, slopes,
        ),
        integers=(call.num_tokens, call.num_seqs, num_blocks, table_stride, parts or splits),
        outputs=(result, state, direct, direct_lse),
        constexprs=_items(**constexprs),
        num_warps=tile.warps,
        num_stages=tile.stages,
        pdl=pdl,
    )  # fmt: skip

    launches: tuple[Launch, ...] = ()
    if pieces:
        shared = {
            name: constexprs[name]
            for name in (
                "PDL", "NUM_QUERY_HEADS", "NUM_KV_HEADS", "GROUP", "OUT_STRIDE_N", "OUT_STRIDE_H",
                "OUT_STRIDE_D", "HAS_VALUE_SHIFT", "SHIFT_STRIDE", "SCALE", "SOFTCAP", "HAS_OFFSET",
                "HAS_ALIBI", "CAUSAL", "WINDOW",
            )
        } | {"HAS_SINKS": has_sinks}  # fmt: skip
        *before, attention = _unpacked_launches(
            call, layout, traits, device, pieces, over,
            page=page, reader=unpacked, shared=shared, table_stride=table_stride, sinks=sinks,
            slopes=slopes, final=final, lse=lse,
        )  # fmt: skip
        launches = tuple(before)

    def merge_of(rows: int, splits: int, inputs: tuple[str, ...], **constexprs: Any) -> Launch:
        # All splits of a row at once, where a warp has registers for some of their coordinates.
        block_s = min(_pow2(splits), 128)
        merge_d = min(block_d, 128, 2048 // block_s)
        if batch:
            block_s, merge_d = _BATCH_MERGE[0], min(block_d, _BATCH_MERGE[1])
        shared = parts > 0 and not constexprs["ONE_BLOCK"]
        if shared:
            # Twice as many as sequences have on average; longer ones take several turns.
            block_s = min(max(16, _pow2(2 * parts // call.num_seqs)), 128)
            merge_d = min(block_d, 128, 2048 // block_s)
        return Launch(
            "merge",
            rows * -(-dim // merge_d),
            inputs=inputs,
            integers=(parts if shared else splits, call.num_seqs),
            outputs=(final, lse),
            constexprs=_items(
                **constexprs,
                DECODE=decode and shared,
                GROUP=group,
                NUM_QUERY_HEADS=call.num_query_heads,
                HEAD_DIM=dim,
                HAS_SINKS=has_sinks,
                OUT_STRIDE_N=final_strides[0],
                OUT_STRIDE_H=final_strides[1],
                OUT_STRIDE_D=final_strides[2],
                SHARED=shared,
                BLOCK_S=block_s,
                BLOCK_D=merge_d,
                SPARSE=batch,
                PDL=pdl,
            ),
            num_warps=1,
            num_stages=1,
            pdl=pdl,
        )

    merge = short = short_merge = output = None
    if partial:
        starts = "query_start_loc" if parts and not decode else "row_terms"
        written = (final.name, "lse") if parts else ("row_terms", "row_terms")
        inputs = ("partial", "state", sinks, starts, *written)
        block_n = tile.block_n if parts and not decode else 1
        merge = merge_of(rows, splits, inputs, ONE_BLOCK=False, BLOCK_N=block_n)
    if mixed:
        block_n = short_tile.block_n
        part_shape = (call.num_seqs * heads * block_n, short_splits)
        short = replace(
            attention,
            grid=call.num_seqs * heads * short_splits,
            integers=(
                call.num_tokens, call.num_seqs, call.num_seqs, table_stride, short_splits
            ),
            outputs=(
                Buffer("short_partial", (*part_shape, dim), "float32"),
                Buffer("short_state", (*part_shape, 2), "float32"),
                direct,
                direct_lse,
            ),
            constexprs=_items(
                **constexprs
                | {
                    "ONE_BLOCK": True,
                    "SHORT": 0,
                    "PARTIAL": True,
                    "HAS_SINKS": False,
                    "BLOCK_T": short_tile.block_t,
                    "BLOCK_N": block_n,
                    "WIDE": block_n >= _WIDE,
                }
            ),
            num_warps=short_tile.warps,
            num_stages=short_tile.stages,
        )  # fmt: skip
        inputs = ("short_partial", "short_state", sinks, "query_start_loc", final.name, "lse")
        short_merge = merge_of(part_shape[0], short_splits, inputs, ONE_BLOCK=True, BLOCK_N=block_n)
    if coded:
        output = Launch(
            "transform_output",
            row_blocks * heads * -(-dim // block_o),
            inputs=("coded", "output_matrix"),
            integers=(call.num_tokens,),
            outputs=(out,),
            constexprs=_items(
                **transform,
                BLOCK_K=min(block_d, 128 if few else 32),
                PRECISION=_precision(device),
                BLOCK_O=block_o,
                STRIDE_N=out_strides[0],
                STRIDE_H=out_strides[1],
                STRIDE_D=out_strides[2],
                MATRIX_STRIDE=traits.value_matrix_stride,
            ),
            num_warps=4,
            num_stages=2,
            pdl=pdl,
        )
    plan = AttentionPlan(query, attention, merge, short, short_merge, output, splits, launches)
    return _without_fusion(plan) if batch else plan


def _split_tiles(call: AttentionCall, over: Mapping[str, int], block_t: int) -> int:
    """Tiles of a KV split where results must not depend on the batch."""
    if "num_splits" in over or call.num_kv_splits is not None:
        name = "num_splits" if "num_splits" in over else "num_kv_splits"
        raise ValueError(
            f"plan: {name} cuts sequences into equal parts, which differ with their length, and "
            "deterministic='batch' into parts of split_tokens; give one of the two"
        )
    tokens = over.get("split_tokens", max(SPLIT_TOKENS, block_t))
    if tokens % block_t:
        raise ValueError(
            f"plan: expected split_tokens to be a multiple of the {block_t} tokens of a tile, "
            f"got {tokens}"
        )
    return tokens // block_t


def _batch_splits(call: AttentionCall, dim: int, split_tokens: int, rows: int) -> int:
    """KV splits up to the bound of the lengths, all with room for their partial sums."""
    splits = max(1, -(-call.max_seq_len // split_tokens))
    size = 4 * dim * rows * splits
    if size > MAX_BATCH_SCRATCH_BYTES:
        raise ValueError(
            f"plan: deterministic='batch' needs {size} bytes for the partial sums of "
            f"{call.num_tokens} query rows over {call.max_seq_len} tokens, and may take "
            f"{MAX_BATCH_SCRATCH_BYTES}; give fewer rows a call, which changes no bit, a smaller "
            f"max_seq_len, or a larger split_tokens than {split_tokens}, which changes the bits"
        )
    return splits


def _without_fusion(plan: AttentionPlan) -> AttentionPlan:
    """The plan with every product rounded: which ones are fused differs from kernel to kernel."""

    def unfused(launch: Launch | None) -> Launch | None:
        return None if launch is None else replace(launch, fp_fusion=False)

    return replace(
        plan,
        query=replace(plan.query, fp_fusion=False),
        attention=replace(plan.attention, fp_fusion=False),
        merge=unfused(plan.merge),
        output=unfused(plan.output),
    )


def _unpacked_reader(
    layout: CacheLayout, page: Mapping[str, Any], traits: Traits, align: int
) -> dict[str, Any]:
    """How codes are read where they become numbers of 16 or 32 bits; as ``dequantize`` does."""
    if traits.key_kind == "grid":
        traits = replace(traits, key_kind="table")
    reader = _reader_constexprs(layout, page, traits, align, wide=False, asm=False)
    unused = (
        "META_PAIR_LOAD", "KEY_PAIR_LOAD", "KEY_BYTES", "KEY_BIAS", "VALUE_PAIRED", "KEY_ASM",
        "KEY_CONSTRAINTS", "VALUE_ASM", "VALUE_CONSTRAINTS",
    )  # fmt: skip
    return {name: value for name, value in reader.items() if name not in unused}


def _unpacked_launches(
    call: AttentionCall,
    layout: CacheLayout,
    traits: Traits,
    device: Device,
    pieces: _Pieces,
    over: Mapping[str, int],
    *,
    page: Mapping[str, Any],
    reader: Mapping[str, Any],
    shared: Mapping[str, Any],
    table_stride: int,
    sinks: str,
    slopes: str,
    final: Buffer,
    lse: Buffer,
) -> list[Launch]:
    """For each piece of the tokens: decoding, then attention of all rows over it."""
    heads, pdl = layout.num_kv_heads, shared["PDL"]
    block_n, block_t = max(16, over.get("block_n", 128)), max(32, over.get("block_t", 128))
    widths = [reader[f"BLOCK_{x}"] * reader[f"{x}_CODES"] for x in ("KEY", "VALUE")]
    # What the largest decoded number of a key becomes: not above 1.
    size = {"grid": 1 / 128, "table": 1 / 4, "fp8": 1 / 2}[traits.key_kind]
    num_blocks = call.num_tokens * call.group // block_n + call.num_seqs + 1
    rows = call.num_tokens * call.num_query_heads
    scratch = (call.num_seqs, heads, pieces.tokens)
    keys = Buffer("unpacked_keys", (*scratch, widths[0]), "float16")
    values = Buffer("unpacked_values", (*scratch, widths[1]), "float16")
    exponents = Buffer("exponents", (*scratch[:2], pieces.tokens // block_t), "float32")
    # Of rows that see tokens of several pieces.
    kept = rows if pieces.number > 1 else 1
    sums = Buffer("sums", (kept, widths[1]), "float32")
    state = Buffer("state", (kept, 2), "float32")
    unpack = _items(
        NUM_KV_HEADS=heads, PIECE=pieces.tokens, PDL=pdl,
        WINDOW=shared["WINDOW"], KEY_SIZE=size, VALUE_LARGEST=traits.value_largest, TILE=block_t,
        BLOCK_T=32, **page, **reader,
    )  # fmt: skip
    sizes = ("KEY_CODES", "VALUE_CODES", "BLOCK_KEY", "BLOCK_VALUE", "HEAD_DIM")
    attend = _items(
        PIECE=pieces.tokens, KEY_SIZE=size, BLOCK_T=block_t, BLOCK_N=block_n,
        **shared, **{name: reader[name] for name in sizes},
    )  # fmt: skip
    tiles = call.num_seqs * heads * (pieces.tokens // 32)
    # Query rows and three tiles of keys and values.
    deep = 2 * (block_n * widths[0] + 3 * block_t * sum(widths)) + 4096
    read = (
        "rotated", "row_terms", "unpacked_keys", "unpacked_values", "exponents", "seq_lens",
        "query_start_loc", "value_shift", sinks, slopes,
    )  # fmt: skip
    launches = []
    for piece in range(pieces.number):
        # Scratch is written again when what was there has been used.
        after = "state" if piece else "seq_lens"
        written = ("sums", "state", final.name, "lse") if piece else ("row_terms",) * 4
        launches.append(
            Launch(
                "unpack",
                tiles,
                inputs=(
                    "cache",
                    "block_table",
                    "seq_lens",
                    "query_start_loc",
                    "key_table",
                    "value_table",
                    after,
                ),
                integers=(table_stride, piece),
                outputs=(keys, values, exponents),
                constexprs=unpack,
                num_warps=4,
                num_stages=1,
                pdl=pdl,
            )
        )
        launches.append(
            Launch(
                "attention_unpacked",
                num_blocks * heads,
                inputs=(*read, *written),
                integers=(call.num_tokens, call.num_seqs, num_blocks, piece),
                outputs=(sums, state, final, lse),
                constexprs=attend,
                num_warps=over.get("num_warps", 8 if block_n >= 128 else 4),
                num_stages=over.get("num_stages", 3 if deep <= device.shared_memory else 2),
                pdl=pdl,
            )
        )
    return launches


def plan_store(
    num_tokens: int,
    num_pages: int,
    layout: CacheLayout,
    traits: Traits,
    device: Device,
    *,
    page_stride: int,
    key_strides: tuple[int, int, int],
    value_strides: tuple[int, int, int],
    slot_stride: int,
    cache_align: int,
) -> Launch:
    """Plans a store into ``num_pages`` pages; strides in elements, ``page_stride`` in bytes.

    ``cache_align``: a power of two that divides the cache's address.
    """
    page = _page_constexprs(layout, page_stride)
    config, dim = layout.config, layout.head_dim
    block_d = max(16, _pow2(dim))
    matrix = traits.has_key_matrix or traits.has_value_matrix
    block_r = 16 if matrix else max(1, min(16, 4096 // block_d))
    blocks = -(-num_tokens // block_r)
    programs = min(blocks, max(1, _STORE_PROGRAMS // layout.num_kv_heads))
    planar = config.key_packing == "planar"
    key_numbers: tuple[int, ...] = (
        page["KEY_HEAD_STRIDE"],
        page["KEY_SLOT_STRIDE"],
        layout.key_bytes,
    )
    key_numbers += (dim // 4 if planar else 0, page_stride, cache_align)
    value_numbers: tuple[int, ...] = (
        page["VALUE_BASE"],
        page["VALUE_HEAD_STRIDE"],
        page["VALUE_SLOT_STRIDE"],
    )
    value_numbers += (page["VALUE_TAIL"], layout.value_bytes, page_stride, cache_align)
    constexprs = {
        "KEY_STRIDE_N": key_strides[0],
        "KEY_STRIDE_H": key_strides[1],
        "KEY_STRIDE_D": key_strides[2],
        "VALUE_STRIDE_N": value_strides[0],
        "VALUE_STRIDE_H": value_strides[1],
        "VALUE_STRIDE_D": value_strides[2],
        "SLOT_STRIDE": slot_stride,
        "HAS_KEY_OFFSET": traits.has_key_offset,
        "KEY_OFFSET_STRIDE": traits.key_offset_stride,
        "HAS_VALUE_OFFSET": traits.has_value_offset,
        "VALUE_OFFSET_STRIDE": traits.value_offset_stride,
        "KEY_PARTS": traits.key_parts,
        "KEY_PART_STRIDE": max(traits.key_matrix_stride * layout.num_kv_heads, dim * dim),
        "KEY_FACTOR": traits.key_product_factor,
        "KEY_MATRIX_STRIDE": traits.key_matrix_stride,
        "HAS_KEY_TRANSFORM": traits.has_key_transform,
        "VALUE_PARTS": traits.value_parts,
        "VALUE_PART_STRIDE": max(traits.value_matrix_stride * layout.num_kv_heads, dim * dim),
        "VALUE_FACTOR": traits.value_product_factor,
        "VALUE_MATRIX_STRIDE": traits.value_matrix_stride,
        "HAS_VALUE_TRANSFORM": traits.has_value_transform,
        "KEY_SCALE_STRIDE": traits.key_scale_stride,
        "NUM_KV_HEADS": layout.num_kv_heads,
        **page,
        "KEY_FP8": not config.key_is_codebook,
        "KEY_BITS": config.key_bits,
        "KEY_PLANAR": planar,
        "KEY_ELEMENT": 1 if any(n % 4 for n in key_numbers) else 4,
        "VALUE_AFFINE": not config.value_is_codebook,
        "VALUE_BITS": config.value_bits,
        "VALUE_ELEMENT": 1 if any(n % 4 for n in value_numbers) else 4,
        "NORM_CORRECTION": config.norm_correction,
        "WIDEN": device.kind == "interpret",
        "HEAD_DIM": dim,
        "BLOCK_R": block_r,
        "BLOCK_D": block_d,
        "BLOCK_K": block_d if block_d <= 128 else 32,
    }
    return Launch(
        "store",
        programs * layout.num_kv_heads,
        inputs=(
            "key", "value", "slot_mapping", "key_matrix", "value_matrix", "key_offset",
            "value_offset", "key_scale", "key_edges", "key_levels", "value_edges", "value_levels",
            "cache",
        ),
        integers=(num_tokens, num_pages, programs),
        outputs=(Buffer("cache", layout.shape(num_pages), "uint8"),),
        constexprs=_items(**constexprs),
        num_warps=4 if block_d <= 256 else 8,
        num_stages=2,
    )  # fmt: skip


def plan_dequantize(
    num_seqs: int,
    capacity: int,
    layout: CacheLayout,
    traits: Traits,
    device: Device,
    *,
    dtype: str,
    page_stride: int,
    table_stride: int,
    cache_align: int,
) -> Launch:
    """Plans a dequantize of ``[num_seqs, capacity]`` tokens to ``dtype``.

    Raises:
        ValueError: a program's tiles do not fit the device's shared memory.
    """
    page = _page_constexprs(layout, page_stride)
    reader = _unpacked_reader(layout, page, traits, cache_align)
    block_d = max(16, _pow2(layout.head_dim))
    block_t, block_o = 16, min(block_d, 64)
    applied = (("KEY", traits.has_key_matrix), ("VALUE", traits.has_value_matrix))
    units = [
        (reader[f"BLOCK_{n}"], reader[f"{n}_CODES"]) for n, has_matrix in applied if has_matrix
    ]

    def shared() -> int:
        """What the compiler takes: a tile of the matrix, and on CUDA the tokens, in two parts."""
        tokens = 8 * block_t if device.kind == "cuda" else 0
        return max((block * (4 * block_o + tokens * codes) for block, codes in units), default=0)

    while shared() > device.shared_memory and block_o > 16:
        block_o //= 2
    if (needed := shared()) > device.shared_memory:
        raise ValueError(
            f"dequantize: the matrices of this codec need about {needed} bytes of shared memory at "
            f"head_dim {layout.head_dim}, a program has {device.shared_memory} here; "
            "backend='native' can do it"
        )
    constexprs = {
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HAS_KEY_MATRIX": traits.has_key_matrix,
        "KEY_MATRIX_STRIDE": traits.key_matrix_stride,
        "HAS_VALUE_MATRIX": traits.has_value_matrix,
        "VALUE_MATRIX_STRIDE": traits.value_matrix_stride,
        "HAS_KEY_OFFSET": traits.has_key_offset,
        "KEY_OFFSET_STRIDE": traits.key_offset_stride,
        "HAS_VALUE_OFFSET": traits.has_value_offset,
        "VALUE_OFFSET_STRIDE": traits.value_offset_stride,
        "FACTOR_STRIDE": traits.factor_stride,
        **page,
        **reader,
        "BLOCK_T": block_t,
        "BLOCK_O": block_o,
        "PRECISION": _precision(device),
    }
    shape = (num_seqs, capacity, layout.num_kv_heads, layout.head_dim)
    return Launch(
        "dequantize",
        num_seqs * -(-capacity // block_t) * layout.num_kv_heads,
        inputs=(
            "cache", "block_table", "seq_lens", "key_table", "value_table", "key_factor",
            "key_inverse", "value_inverse", "key_offset", "value_offset",
        ),
        integers=(capacity, table_stride),
        outputs=(Buffer("keys", shape, dtype), Buffer("values", shape, dtype)),
        constexprs=_items(**constexprs),
        num_warps=4 if block_d <= 256 else 8,
        # At a head_dim of 576 a second stage would not fit the shared memory.
        num_stages=1,
    )  # fmt: skip
