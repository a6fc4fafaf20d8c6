"""One table of shapes and features for every backend, and the checks of their results.

numpy only. A suite writes two loops::

    @pytest.mark.parametrize("case", STORE_CASES, ids=str)
    def test_store(case):
        inputs = make_store_inputs(case)
        ...                                   # store inputs.key, ... into inputs.cache
        assert_same_bytes(cache, inputs, layout=case.layout, codec=case.codec)

    @pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
    def test_attention(case):
        inputs = make_attention_inputs(case)
        ...                                   # attention(**inputs, **case.options)
        assert_close(out, lse, case)

Floating inputs are float32 arrays that ``case.dtype`` represents exactly: cast them to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tq_core import CacheLayout, Codec, QuantConfig, packing, reference
from tq_core.codebook import midpoints
from tq_core.config import KEY_FORMATS, PRESETS, VALUE_FORMATS
from tq_core.layout import ORDERS

HEAD_DIMS = (8, 64, 72, 80, 96, 100, 112, 128, 192, 256, 576)
PAGE_SIZES = (1, 3, 16, 64)
DTYPES = ("float32", "float16", "bfloat16")
GARBAGE = 0xFF

#: Every key format (planar 3 bit is one more) with every value format.
CONFIGS = tuple(
    QuantConfig(key=key, value=value, key_packing=packing_)
    for key, packing_ in [*((k, "dense") for k in KEY_FORMATS), ("mse3", "planar")]
    for value in VALUE_FORMATS
)
PRESET_CONFIGS = {name: QuantConfig.preset(name) for name in PRESETS}


def config_id(config: QuantConfig) -> str:
    key = config.key + ("planar" if config.key_packing == "planar" else "")
    return f"{key}-{config.value}" + ("" if config.norm_correction else "-nonorm")


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that ``dtype`` represents exactly, rounded to nearest even."""
    array = np.asarray(array, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        result = bits.astype(np.uint32).view(np.float32)
        return np.where(np.isfinite(array), result, array)
    return array


# --- codecs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extras:
    """Optional parts of a codec: each None, ``"shared"`` (one for all heads) or ``"heads"``."""

    key_offset: str | None = None
    value_offset: str | None = None
    key_transform: str | None = None
    value_transform: str | None = None
    key_scale: str | None = None

    def __str__(self) -> str:
        given = [f"{f.name}_{v}" for f in fields(self) if (v := getattr(self, f.name))]
        return "+".join(given)


PLAIN = Extras()


@cache
def make_codec(
    config: QuantConfig, head_dim: int, num_kv_heads: int, extras: Extras, seed: int = 0
) -> Codec:
    rng = np.random.default_rng(1000 + seed)
    arguments: dict[str, np.ndarray] = {}
    for item in fields(extras):
        kind = getattr(extras, item.name)
        if kind is None:
            continue
        heads = 1 if kind == "shared" else num_kv_heads
        if item.name.endswith("offset"):
            array = rng.normal(0, 2, (heads, head_dim))
        elif item.name.endswith("transform"):
            array = np.stack([_transform(rng, head_dim) for _ in range(heads)])
        else:
            array = rng.uniform(0.3, 3, heads)
        arguments[item.name] = array[0] if kind == "shared" else array
    return Codec(config, head_dim, seed=seed, **arguments)


def _transform(rng: np.random.Generator, size: int) -> np.ndarray:
    """Invertible, neither symmetric nor orthogonal, of norm 1, condition number 2."""
    left, right = (np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(2))
    return left * np.linspace(0.5, 1, size) @ right


# --- store ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreCase:
    """One call of ``store``."""

    config: QuantConfig
    head_dim: int
    page_size: int = 16
    order: str = "planes"
    num_kv_heads: int = 2
    dtype: str = "float32"
    extras: Extras = PLAIN
    seed: int = 0
    num_tokens: int = 29

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(
            self.config, self.num_kv_heads, self.head_dim, self.page_size, self.order
        )

    @property
    def codec(self) -> Codec:
        return make_codec(self.config, self.head_dim, self.num_kv_heads, self.extras, self.seed)

    def __str__(self) -> str:
        return "-".join(
            filter(
                None,
                [
                    config_id(self.config),
                    f"D{self.head_dim}",
                    f"P{self.page_size}",
                    self.order,
                    f"Hk{self.num_kv_heads}",
                    self.dtype,
                    str(self.extras),
                    f"seed{self.seed}" if self.seed else "",
                ],
            )
        )


def _store_cases() -> tuple[StoreCase, ...]:
    places = list(product(ORDERS, PAGE_SIZES))
    cases: list[StoreCase] = []
    count: dict[tuple[bool, bool], int] = {}
    for config, head_dim in product(CONFIGS, HEAD_DIMS):
        family = (config.key_is_codebook, config.value_is_codebook)
        i = count[family] = count.get(family, -1) + 1
        order, page_size = places[i % len(places)]
        cases.append(
            StoreCase(
                config,
                head_dim,
                page_size,
                order,
                num_kv_heads=1 + i % 3,
                dtype=DTYPES[(i + i // len(places)) % 3],
            )
        )
    pairs = [("mse4", "int4"), ("mse3", "mse3"), ("fp8", "int8"), ("fp8", "mse4"), ("mse2", "int2")]
    every = ("key_offset", "value_offset", "key_transform", "value_transform")
    for i, (key, value) in enumerate(pairs):
        config = QuantConfig(key=key, value=value)
        head_dim = (64, 72, 100, 128, 8)[i]
        for j, names in enumerate([every[:2], every[2:], every]):
            kinds = {name: ("heads", "shared")[(i + j + k) % 2] for k, name in enumerate(names)}
            extras = Extras(**kinds)
            if key == "fp8":
                extras = replace(extras, key_scale=("heads", "shared")[j % 2])
            order, page_size = places[(5 * i + 7 * j) % len(places)]
            cases.append(
                StoreCase(config, head_dim, page_size, order, 3, DTYPES[j], extras, seed=i)
            )
    for i, (key, value) in enumerate([("mse4", "int4"), ("mse3", "mse4"), ("mse2", "mse2")]):
        config = QuantConfig(key=key, value=value, norm_correction=False)
        cases.append(StoreCase(config, (64, 96, 100)[i], order=ORDERS[i], seed=7))
    for i, kind in enumerate(("shared", "heads")):
        config = QuantConfig(key="fp8", value="int4")
        cases.append(StoreCase(config, 80, 16, ORDERS[i], extras=Extras(key_scale=kind)))
    return tuple(cases)


STORE_CASES = _store_cases()


class StoreInputs(NamedTuple):
    """Arguments of ``store``; ``cache`` is the state before the call."""

    key: np.ndarray  # float32 [N, Hk, D]
    value: np.ndarray  # float32 [N, Hk, D]
    cache: np.ndarray  # uint8 [num_pages, P, Hk, slot_bytes], all GARBAGE
    slot_mapping: np.ndarray  # int64 [N]


def make_store_inputs(case: StoreCase) -> StoreInputs:
    """Random vectors and the hard ones, permuted slots with gaps, every ninth row skipped.

    A vector whose rotated coordinates fall exactly on a bucket edge (a constant one, a Walsh row)
    is not here, since its codes are anybody's choice; see :func:`hard_keys` for those.
    """
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    n, heads, dim = case.num_tokens, case.num_kv_heads, case.head_dim
    key, value = rng.normal(size=(2, n, heads, dim)).astype(np.float32)
    place = rng.integers(dim, size=8)
    head = np.arange(8) % heads
    every = np.arange(heads)

    key[0] = 0
    key[1] += 10
    key[2] = 0
    key[2, every, (place[0] + every) % dim] = -5 - every
    key[3] *= 500 / np.sqrt(dim)
    key[4] = np.clip(key[4] * 3e4, -6e4, 6e4)
    key[5] *= 1e-6
    key[6, head[1], place[1]] = np.nan
    key[7, head[2], place[2]] = np.inf
    key[8, head[3], place[3]] = -np.inf
    key[10, head[4], place[4]] = 70000

    value[0] = 0
    value[1] += 1000 if case.dtype != "bfloat16" or not case.config.value_is_codebook else 10
    value[2] = 0
    value[2, every, (place[5] + every) % dim] = 3 + every
    value[3] *= 1e-6
    value[4, head[0], place[0]] = 70000
    value[5, head[1], place[1]] = -70000
    value[6, head[2], place[2]] = np.nan
    value[7, head[3], place[3]] = np.inf
    value[8, head[4], place[4]] = -np.inf
    if not case.config.value_is_codebook:
        value[10] = 3.7
        value[11] = 1000.3
        value[12] = 10000 + value[12]

    num_pages = -(-n // case.page_size) + 2
    cache_ = np.full(case.layout.shape(num_pages), GARBAGE, np.uint8)
    slots = rng.permutation(num_pages * case.page_size)[:n]
    slots[9::9] = -1
    slots[18] = -(2**31)
    return StoreInputs(
        rounded(key, case.dtype), rounded(value, case.dtype), cache_, slots.astype(np.int64)
    )


def hard_keys(head_dim: int) -> dict[str, np.ndarray]:
    """Keys that a bad rotation ruins, float32 ``[n, D]`` by name.

    At 4 bit the cosine of each with its reconstruction is at least 0.99.
    """
    rng = np.random.default_rng(head_dim)
    spread = rng.normal(size=(16, head_dim))
    index = np.arange(head_dim)
    # Rows of the largest Sylvester matrix whose order divides D, repeated.
    parity = np.bitwise_count(index & index[: head_dim & -head_dim, None]) & 1
    return {
        "constant": np.ones((1, head_dim), np.float32),
        "common offset": (10 + spread).astype(np.float32),
        "one-hot": (3 * np.eye(head_dim, dtype=np.float32))[:: max(1, head_dim // 16)],
        "walsh row": 1 - 2 * parity.astype(np.float32),
        "huge channel": (spread + 1000 * (index == head_dim // 3)).astype(np.float32),
    }


MIDPOINT_TOLERANCE = 1e-5
MAX_FRACTION = 1e-3
SHORTEST = 2.0**-62
MAX_FEW = 2


class Differences(NamedTuple):
    """How often a cache differed from the reference in the ways that are allowed."""

    codes: int
    num_codes: int
    fields: int
    num_fields: int


def assert_same_bytes(
    actual: np.ndarray,
    inputs: StoreInputs,
    *,
    layout: CacheLayout,
    codec: Codec,
    most: float = MAX_FRACTION,
) -> Differences:
    """``actual`` is what ``reference.store`` writes into ``inputs.cache``.

    Two differences are allowed, and counted: a code whose coordinate lies within 1e-5 of the edge
    between the two codes, and an fp16 field one unit apart. A field is compared with the one that
    belongs to the codes actually stored (the norm correction), affine codes with those that belong
    to the scale and zero actually stored. Each count must be below ``most`` of all, or at most 2;
    vectors that lie on edges by construction need more than 1e-3.
    All other bytes are equal, those that ``store`` must not touch included.

    A coordinate is in units of the vector's norm (codebooks), or of the affine step; where a
    transform mixes coordinates in fp32, in units of the norm if that is larger. fp8 keys without a
    transform must be equal.
    """
    actual = np.asarray(actual)
    assert actual.dtype == np.uint8
    assert actual.shape == inputs.cache.shape
    expected = inputs.cache.copy()
    reference.store(
        inputs.key, inputs.value, expected, inputs.slot_mapping, layout=layout, codec=codec
    )
    if np.array_equal(actual, expected):
        written = int((inputs.slot_mapping >= 0).sum()) * layout.num_kv_heads
        return Differences(0, 2 * written * layout.head_dim, 0, written * layout.num_meta_fields)

    rows = np.flatnonzero(inputs.slot_mapping >= 0)
    page, slot = np.divmod(inputs.slot_mapping[rows], layout.page_size)
    pages = actual.reshape(len(actual), -1)
    untouched = np.ones(pages.shape, bool)
    parts = []
    for index in (layout.key_index(), layout.value_index(), layout.meta_index()):
        places = (page[:, None, None], index[slot])
        parts.append(pages[places])
        untouched[places] = False
    high = (page[:, None, None], layout.meta_index()[slot] + 1)
    untouched[high] = False
    wrong = np.argwhere(untouched & (pages != expected.reshape(pages.shape)))
    assert not len(wrong), f"{len(wrong)} bytes that must not change, first (page, byte) {wrong[0]}"
    stored = np.stack([parts[2], pages[high]], -1).view("<f2")[..., 0]  # [n, Hk, F]
    assert np.isfinite(stored).all(), "a stored scale or zero is not finite"

    config, count = layout.config, _Count()
    for name, data, x, packing_ in (
        ("key", parts[0], inputs.key[rows], config.key_packing),
        ("value", parts[1], inputs.value[rows], "dense"),
    ):
        bits = config.key_bits if name == "key" else config.value_bits
        codes = packing.unpack(data, layout.head_dim, bits, packing_)
        assert np.array_equal(packing.pack(codes, bits, packing_), data), f"{name}: padding bits"
        offset, transform = (getattr(codec, f"{name}_{n}") for n in ("offset", "transform"))
        coded = reference.coded_vectors(x, offset, transform)
        if name == "key" and config.key_is_codebook:
            _check_codebook(count, name, codes, stored[..., 0], coded, codec)
        elif name == "value" and config.value_is_codebook:
            _check_codebook(count, name, codes, stored[..., -1], coded, codec)
        elif name == "key":
            _check_fp8(count, codes, coded, codec)
        else:
            _check_affine(count, codes, stored[..., -2:], coded, codec)
    assert count.codes <= max(MAX_FEW, most * count.num_codes), f"codes differ: {count}"
    assert count.fields <= max(MAX_FEW, most * count.num_fields), f"fields differ: {count}"
    return Differences(count.codes, count.num_codes, count.fields, count.num_fields)


@dataclass
class _Count:
    codes: int = 0
    num_codes: int = 0
    fields: int = 0
    num_fields: int = 0

    def add_codes(self, name: str, differ: np.ndarray, allowed: np.ndarray) -> None:
        self.codes += int(differ.sum())
        self.num_codes += differ.size
        wrong = np.argwhere(differ & ~allowed)
        assert not len(wrong), (
            f"{name}: {len(wrong)} of {differ.size} codes are wrong, first (row, head, dim) "
            f"{wrong[0]}"
        )

    def add_fields(self, name: str, stored: np.ndarray, expected: np.ndarray) -> None:
        apart = np.abs(_ordered(stored) - _ordered(expected))
        self.fields += int((apart > 0).sum())
        self.num_fields += apart.size
        wrong = np.argwhere(apart > 1)
        assert not len(wrong), (
            f"{name}: {len(wrong)} of {apart.size} are wrong, first (row, head) {wrong[0]}: "
            f"{stored[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
        )
        negative_zero = (stored == 0) & np.signbit(stored)
        assert not negative_zero.any(), f"{name}: a stored zero is -0"


def _ordered(x: np.ndarray) -> np.ndarray:
    """fp16 as integers in the order of the numbers, one apart for neighbours."""
    bits = np.ascontiguousarray(x).view(np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def _check_codebook(
    count: _Count,
    name: str,
    codes: np.ndarray,
    scale: np.ndarray,
    coded: np.ndarray,
    codec: Codec,
) -> None:
    centroids = codec.centroids if name == "key" else codec.value_centroids
    assert centroids is not None
    norm = np.sqrt((coded**2).sum(-1, keepdims=True))
    unit = np.divide(coded, norm, out=np.zeros_like(coded), where=norm > 0)
    y = unit @ codec.rotation.astype(np.float64).T
    edges = midpoints(centroids).astype(np.float64)
    want = np.searchsorted(edges, y, side="right")
    edge = edges[np.clip(np.minimum(codes, want), 0, len(edges) - 1)]
    near = (np.abs(codes - want.astype(int)) == 1) & (np.abs(y - edge) <= MIDPOINT_TOLERANCE)
    # Of a vector so short, but not zero, the codes mean nothing: its scale is 0.
    count.add_codes(name, (codes != want) & ((norm >= SHORTEST) | (norm == 0)), near)
    expected = norm[..., 0]
    if codec.config.norm_correction:
        expected = expected / np.sqrt((centroids.astype(np.float64)[codes] ** 2).sum(-1))
    count.add_fields(f"{name} scale", scale, np.minimum(expected, 65504).astype(np.float16))


def _check_fp8(count: _Count, codes: np.ndarray, coded: np.ndarray, codec: Codec) -> None:
    x = coded.astype(np.float32) / codec.key_scale[:, None]
    want = packing.encode_e4m3(x)
    have_value, want_value = (packing.e4m3_values().astype(np.float64)[c] for c in (codes, want))
    near = np.zeros(codes.shape, bool)
    if codec.key_transform is not None:
        between = np.abs(_fp8_rank(codes) - _fp8_rank(want)) <= 1
        edge = 0.5 * (have_value + want_value)
        norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))
        near = between & (np.abs(x - edge) <= MIDPOINT_TOLERANCE * norm)
    count.add_codes("key", codes != want, near)


def _fp8_rank(codes: np.ndarray) -> np.ndarray:
    magnitude = (codes & 127).astype(int)
    return np.where(codes & 128, -magnitude, magnitude)


def _check_affine(
    count: _Count, codes: np.ndarray, stored: np.ndarray, coded: np.ndarray, codec: Codec
) -> None:
    levels = 2**codec.config.value_bits - 1
    x = np.clip(coded, -65504, 65504).astype(np.float32)
    zero, scale = stored[..., 1], stored[..., 0]
    want_zero = x.min(-1).astype(np.float16)
    count.add_fields("value zero", zero, want_zero)
    span = x.max(-1) - zero.astype(np.float32)
    count.add_fields("value scale", scale, (span / np.float32(levels)).astype(np.float16))
    zero, scale = (a.astype(np.float32)[..., None] for a in (zero, scale))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        want = np.clip(np.nan_to_num(np.floor((x - zero) / scale + np.float32(0.5))), 0, levels)
        step = (x.astype(np.float64) - zero) / scale
        slack = np.full(step.shape, MIDPOINT_TOLERANCE)
        if codec.value_transform is not None:
            norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))
            slack = MIDPOINT_TOLERANCE * np.maximum(1, np.abs(norm / scale) + 0 * step)
        want = np.where(scale == 0, 0, want)
        edge = np.minimum(codes, want) + 0.5
        near = (np.abs(codes - want) == 1) & (np.abs(step - edge) <= slack)
    count.add_codes("value", codes != want, near)


# --- attention ------------------------------------------------------------------------------

#: (query rows, cached tokens) of each sequence. Rows come after the tokens they do not see.
SMALL = ((1, 17), (5, 3), (0, 16), (33, 40), (2, 0), (1, 1), (1, 130))
MIXED = (
    (1, 1000),
    (0, 15),
    (5, 17),
    (128, 1000),
    (33, 33),
    (2, 16),
    (1, 0),
    (5, 3),
    (0, 0),
    (2, 1),
    (1, 15),
    (33, 17),
)
DECODE = ((1, 1000), (1, 1), (1, 16), (1, 0), (1, 17), (1, 15), (1, 257))
PREFIX_HIT = ((500, 1500), (100, 100))
SINKS = (-np.inf, -100.0, 0.0, 30.0)
LARGE_WINDOW = 100_000


@dataclass(frozen=True)
class AttentionCase:
    """One call of ``attention``."""

    config: QuantConfig = PRESET_CONFIGS["4bit"]
    head_dim: int = 64
    page_size: int = 16
    order: str = "planes"
    num_kv_heads: int = 2
    group: int = 4
    dtype: str = "float32"
    batch: tuple[tuple[int, int], ...] = SMALL
    scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    extras: Extras = PLAIN
    shared_pages: bool = False
    padding_rows: int = 0
    key_mean: float = 0.0
    seed: int = 0

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(
            self.config, self.num_kv_heads, self.head_dim, self.page_size, self.order
        )

    @property
    def codec(self) -> Codec:
        return make_codec(self.config, self.head_dim, self.num_kv_heads, self.extras, self.seed)

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def is_decode(self) -> bool:
        """One row a sequence: ``decode_attention`` takes the same inputs but query_start_loc."""
        return not self.padding_rows and all(rows == 1 for rows, _ in self.batch)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``attention`` that are no arrays."""
        return {
            "layout": self.layout,
            "codec": self.codec,
            "scale": self.scale,
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
        }

    def __str__(self) -> str:
        names = {SMALL: "", MIXED: "mixed", DECODE: "decode", PREFIX_HIT: "prefix_hit"}
        parts = [
            config_id(self.config),
            f"D{self.head_dim}",
            f"P{self.page_size}",
            self.order,
            f"Hk{self.num_kv_heads}",
            f"g{self.group}",
            self.dtype,
            names.get(self.batch, "batch"),
            "" if self.scale is None else f"scale{self.scale:g}",
            "" if self.causal else "full",
            "" if self.sliding_window is None else f"window{self.sliding_window}",
            "" if self.softcap is None else f"softcap{self.softcap:g}",
            "sinks" if self.sinks else "",
            "alibi" if self.alibi else "",
            str(self.extras),
            "shared" if self.shared_pages else "",
            f"pad{self.padding_rows}" if self.padding_rows else "",
            f"keys+{self.key_mean:g}" if self.key_mean else "",
            f"seed{self.seed}" if self.seed else "",
        ]
        return "-".join(filter(None, parts))


def _attention_cases() -> tuple[AttentionCase, ...]:
    cases = []
    places = list(product(ORDERS, PAGE_SIZES))
    for i, config in enumerate(CONFIGS):
        order, page_size = places[i % len(places)]
        cases.append(
            AttentionCase(
                config,
                (64, 72, 128, 100, 96)[i % 5],
                page_size,
                order,
                num_kv_heads=1 + i % 2,
                group=(4, 3, 1)[i % 3],
                dtype=DTYPES[(i + i // len(places)) % 3],
            )
        )
    base = AttentionCase(batch=MIXED)
    k3v4, bits3, k8v4, hq = (PRESET_CONFIGS[n] for n in ("k3v4", "3bit", "k8v4", "3bit_hq"))
    for group, dtype in [(1, "float16"), (3, "bfloat16"), (7, "float32"), (8, "float16")]:
        cases.append(replace(base, group=group, dtype=dtype, shared_pages=True))
    cases += [
        replace(base, num_kv_heads=1, group=16, dtype="bfloat16", head_dim=128, config=k3v4),
        replace(base, num_kv_heads=1, group=71, dtype="float16", config=k8v4, shared_pages=True),
        # One feature each.
        replace(base, sliding_window=1),
        replace(base, sliding_window=16, config=bits3, page_size=3, dtype="float16"),
        replace(base, sliding_window=17, config=hq, order="head", dtype="bfloat16"),
        replace(base, sliding_window=LARGE_WINDOW, config=k8v4, order="token", page_size=64),
        replace(base, softcap=5.0, config=k3v4, head_dim=80, dtype="float16"),
        replace(base, alibi=True, config=k8v4, head_dim=112),
        replace(base, sinks=True, head_dim=128, dtype="bfloat16"),
        replace(base, scale=0.21, config=hq, padding_rows=3),
        replace(base, causal=False, dtype="float16", config=bits3),
        # Features together.
        replace(base, causal=False, sliding_window=17, sinks=True, alibi=True, config=k3v4),
        replace(base, sliding_window=16, softcap=20.0, sinks=True, dtype="float16", page_size=1),
        replace(
            base,
            sliding_window=17,
            softcap=8.0,
            sinks=True,
            alibi=True,
            scale=0.15,
            padding_rows=5,
            shared_pages=True,
            dtype="bfloat16",
            config=bits3,
            extras=Extras("heads", "heads", "heads", "heads"),
        ),
        # One row a sequence.
        replace(base, batch=DECODE, head_dim=256, dtype="bfloat16", shared_pages=True),
        replace(base, batch=DECODE, head_dim=576, num_kv_heads=1, config=k3v4, dtype="float16"),
        replace(base, batch=DECODE, config=k8v4, sinks=True, sliding_window=17, page_size=3),
        replace(base, batch=DECODE, head_dim=8, config=PRESET_CONFIGS["2bit_hq"], alibi=True),
        replace(base, batch=DECODE, head_dim=192, config=PRESET_CONFIGS["2bit"], softcap=10.0),
        replace(base, batch=PREFIX_HIT, num_kv_heads=1, group=2, config=k3v4, dtype="float16"),
        # Codecs.
        replace(base, extras=Extras(key_offset="shared"), key_mean=10.0, dtype="float16"),
        replace(base, extras=Extras(value_offset="heads"), config=hq, seed=1),
        replace(base, extras=Extras(key_transform="heads"), head_dim=72, config=k3v4, seed=2),
        replace(base, extras=Extras(value_transform="shared"), config=hq, dtype="bfloat16"),
        replace(base, extras=Extras("heads", "shared", "shared", "heads"), sinks=True, seed=3),
        replace(base, extras=Extras("shared", "heads", "heads", "shared", "heads"), config=k8v4),
        replace(
            base,
            extras=Extras("heads", "heads", key_scale="shared"),
            config=PRESET_CONFIGS["k8v8"],
            sliding_window=17,
            dtype="float16",
        ),
    ]
    return tuple(cases)


ATTENTION_CASES = _attention_cases()


def make_attention_inputs(case: AttentionCase) -> dict[str, np.ndarray | None]:
    """Array arguments of ``attention`` by name, new writable arrays at each call.

    Every cache byte that no sequence uses is GARBAGE (NaN as a scale or as an fp8 code). Entries
    of the block table past a sequence's end or wholly before its window are -1.
    """
    return {
        name: None if array is None else array.copy()
        for name, array in _attention_inputs(case).arrays.items()
    }


class _Attention(NamedTuple):
    arrays: dict[str, np.ndarray | None]
    key_length: np.ndarray  # largest ||k|| that any sequence sees, [Hk]
    value_peak: np.ndarray  # largest |v| that any sequence sees, [Hk]


@cache
def _attention_inputs(case: AttentionCase) -> _Attention:
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    layout, size = case.layout, case.page_size
    heads, dim = case.num_kv_heads, case.head_dim
    rows, lengths = np.array(case.batch).T
    needed = -(-lengths // size)
    num_pages = int(needed.sum()) + 3
    free = rng.permutation(num_pages)
    table = np.full((len(rows), max(1, int(needed.max()))), -1, np.int32)
    used = 0
    for b, count in enumerate(needed):
        table[b, :count] = free[used : used + count]
        used += count
    if case.shared_pages:
        # A common prefix: whole pages of the longest sequence serve the others too.
        longest = int(np.argmax(lengths))
        for b, length in enumerate(lengths):
            common = max(0, int(length) // size - 1) if b != longest else 0
            table[b, :common] = table[longest, :common]

    slots = [
        table[b, np.arange(length) // size].astype(np.int64) * size + np.arange(length) % size
        for b, length in enumerate(lengths)
    ]
    mapping = rng.permutation(np.unique(np.concatenate(slots)))
    key, value = rng.normal(size=(2, len(mapping), heads, dim))
    key += case.key_mean
    cache_ = np.full(layout.shape(num_pages), GARBAGE, np.uint8)
    reference.store(
        rounded(key, case.dtype),
        rounded(value, case.dtype),
        cache_,
        mapping,
        layout=layout,
        codec=case.codec,
    )
    keys, dense = reference.dequantize(
        cache_, table, lengths.astype(np.int32), layout=layout, codec=case.codec
    )

    if case.sliding_window is not None:
        for b, (count, length) in enumerate(case.batch):
            first = max(0, length - count - case.sliding_window + 1)
            table[b, : min(first, length) // size] = -1
    num_tokens = int(rows.sum()) + case.padding_rows
    query = rng.normal(size=(num_tokens, case.num_query_heads, dim))
    slopes = 2.0 ** -np.linspace(1, 8, case.num_query_heads)
    arrays: dict[str, np.ndarray | None] = {
        "query": rounded(query, case.dtype),
        "cache": cache_,
        "block_table": table,
        "seq_lens": lengths.astype(np.int32),
        "query_start_loc": np.concatenate([[0], rows.cumsum()]).astype(np.int32),
        "sinks": np.resize(SINKS, case.num_query_heads).astype(np.float32) if case.sinks else None,
        "alibi_slopes": slopes.astype(np.float32) if case.alibi else None,
    }
    key_length = np.linalg.norm(keys, axis=-1).max((0, 1))
    return _Attention(arrays, key_length, np.abs(dense).max((0, 1, 3)))


@cache
def expected(case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """Output ``[N, Hq, D]`` and LSE ``[N, Hq]`` of the float64 reference, read-only."""
    out, lse = reference.attention(
        **_attention_inputs(case).arrays, **case.options, return_lse=True
    )
    out.flags.writeable = lse.flags.writeable = False
    return out, lse


#: Largest relative Frobenius error of an output, by the query's dtype.
TOLERANCE = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 4e-3}
#: Half the distance of the smallest numbers of a dtype: below it an output may become zero.
_UNDERFLOW = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}


class Wanted(NamedTuple):
    """The reference's results, and what their tolerances are made of."""

    out: np.ndarray  # float64 [N, Hq, D]
    lse: np.ndarray  # float64 [N, Hq]
    blind: np.ndarray  # bool [N], rows that see nothing
    empty_lse: np.ndarray  # [Hq], of a row that sees nothing
    peak: np.ndarray  # [N, Hq], largest |v| that a row may see
    score: np.ndarray  # [N, Hq], scale ||q|| max ||k|| / sqrt(D)


def assert_close(out: np.ndarray, lse: np.ndarray | None, case: AttentionCase) -> None:
    """``out`` (and ``lse``, if given) are the reference's within the case's tolerance."""
    inputs = _attention_inputs(case)
    sinks = inputs.arrays["sinks"]
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    query = np.linalg.norm(inputs.arrays["query"], axis=-1)
    wanted = Wanted(
        *expected(case),
        blind_rows(case),
        np.full(case.num_query_heads, -np.inf) if sinks is None else sinks,
        np.broadcast_to(np.repeat(inputs.value_peak, case.group), query.shape),
        scale * query * np.repeat(inputs.key_length, case.group) / np.sqrt(case.head_dim),
    )
    assert_near(out, lse, wanted, case.dtype)


def assert_near(out: np.ndarray, lse: np.ndarray | None, wanted: Wanted, dtype: str) -> None:
    """Results are those wanted within the tolerance t of a query's dtype.

    An implementation in the query's dtype errs in each weight by a factor 1 + e with |e| of the
    order of t, and rounds queries, values and output. Hence the bounds:

    * all: ``|out - ref|_F <= t |ref|_F``;
    * RMS of a row: ``4 t`` of the row's own, so that short sequences do not hide long ones, or
      ``t max |v| / 10`` where that is more: where values far from 0 cancel in the mean;
    * each element: ``2 t (|ref| + max |v|)``: ``|sum p_j e_j (v_j - ref)|`` is at most
      ``t (max |v| + |ref|)``, and the rounding of values and output adds at most the same again;
    * LSE: ``2 t (1 + |ref| + scale ||q|| max ||k|| / sqrt(D))``, the error of a score: that of its
      own rounding and that of the D coordinates of a query, rounded independently;
    * rows that see nothing: exactly 0, and exactly the sink or -inf.

    An fp16 output may be infinite where the reference is at the end of its range.
    """
    want, want_lse, blind, empty_lse, peak, score = wanted
    tolerance = TOLERANCE[dtype]
    out = np.asarray(out, np.float64)
    assert out.shape == want.shape
    if dtype == "float16":
        end = np.abs(want) > 65504 * (1 - 2 * tolerance)
        out = np.where(end & (np.abs(out) >= 65504) & (out * want > 0), want, out)
    assert np.isfinite(out).all(), f"{_where(~np.isfinite(out))} is not finite"
    error = np.abs(out - want)
    assert not out[blind].any(), f"{_where(out[blind] != 0)} of the rows that see nothing is not 0"

    underflow = _UNDERFLOW[dtype]
    whole, want_whole = np.linalg.norm(error), np.linalg.norm(want)
    assert whole <= tolerance * want_whole + underflow * error.size**0.5, (
        f"relative Frobenius error {whole / want_whole:.2e} > {tolerance:g}"
    )
    rms, want_rms = (np.sqrt((a**2).mean(-1)) for a in (error, want))
    too_far = rms > np.maximum(4 * tolerance * want_rms, tolerance / 10 * peak) + underflow
    assert not too_far.any(), (
        f"RMS error of {_where(too_far)} is {rms[too_far][0]:.2e}, the row's RMS "
        f"{want_rms[too_far][0]:.2e}"
    )
    too_far = error > 2 * tolerance * (np.abs(want) + peak[..., None]) + underflow
    assert not too_far.any(), f"error at {_where(too_far)} is {error[too_far][0]:.2e}"

    if lse is None:
        return
    lse = np.asarray(lse, np.float64)
    assert lse.shape == want_lse.shape
    assert np.array_equal(lse[blind], np.broadcast_to(empty_lse, lse[blind].shape))
    seen = ~blind
    assert np.isfinite(lse[seen]).all(), f"LSE at {_where(~np.isfinite(lse[seen]))} is not finite"
    error = np.abs(lse[seen] - want_lse[seen])
    too_far = error > 2 * tolerance * (1 + np.abs(want_lse) + score)[seen]
    assert not too_far.any(), f"LSE error at {_where(too_far)} is {error[too_far][0]:.2e}"


def reach(
    cache: np.ndarray,
    block_table: np.ndarray,
    batch: Iterable[tuple[int, int]],
    sliding_window: int | None,
    *,
    layout: CacheLayout,
    codec: Codec,
) -> tuple[np.ndarray, np.ndarray]:
    """Largest ``|v|`` and ``||k||`` that each query row of a batch may see, ``[N, Hk]``."""
    batch = list(batch)
    peak, length = np.zeros((2, sum(rows for rows, _ in batch), layout.num_kv_heads))
    start = 0
    for b, (rows, tokens) in enumerate(batch):
        first = 0 if sliding_window is None else max(0, tokens - rows - sliding_window + 1)
        page = first // layout.page_size
        left = tokens - page * layout.page_size
        if rows and tokens > first:
            keys, values = reference.dequantize(
                cache, block_table[b : b + 1, page:], np.array([left], np.int32),
                layout=layout, codec=codec,
            )  # fmt: skip
            seen = slice(first - page * layout.page_size, left)
            peak[start : start + rows] = np.abs(values[0, seen]).max((0, 2))
            length[start : start + rows] = np.linalg.norm(keys[0, seen], axis=-1).max(0)
        start += rows
    return peak, length


def judge(arrays: Mapping[str, np.ndarray | None], **options: Any) -> Wanted:
    """What the reference makes of a call of ``attention``."""
    out, lse = reference.attention(**arrays, **options, return_lse=True)
    layout, window = options["layout"], options["sliding_window"]
    query, starts, sinks = arrays["query"], arrays["query_start_loc"], arrays.get("sinks")
    batch = list(zip(np.diff(starts).tolist(), arrays["seq_lens"].tolist(), strict=True))
    around = ((starts[0], len(query) - starts[-1]), (0, 0))
    group = query.shape[1] // layout.num_kv_heads
    peak, length = (
        np.pad(np.repeat(a, group, 1), around)
        for a in reach(
            arrays["cache"], arrays["block_table"], batch, window,
            layout=layout, codec=options["codec"],
        )
    )  # fmt: skip
    dim = layout.head_dim
    scale = dim**-0.5 if options["scale"] is None else abs(options["scale"])
    blind = np.pad(
        np.array(blind_rows_of(batch, window, options["causal"]), bool),
        around[0],
        constant_values=True,
    )
    nothing = np.full(query.shape[1], -np.inf) if sinks is None else sinks
    score = scale * np.linalg.norm(query.astype(np.float64), axis=-1) * length / np.sqrt(dim)
    return Wanted(out, lse, blind, nothing, peak, score)


def blind_rows(case: AttentionCase) -> np.ndarray:
    """Which query rows see no token, bool ``[N]``."""
    blind = blind_rows_of(case.batch, case.sliding_window, case.causal)
    return np.array(blind + [True] * case.padding_rows, bool)


def blind_rows_of(
    batch: Iterable[tuple[int, int]], sliding_window: int | None, causal: bool
) -> list[bool]:
    """The same for query rows and tokens of each sequence."""
    blind = []
    for rows, length in batch:
        for i in range(rows):
            position = length - rows + i
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            high = min(length, position + 1) if causal else length
            blind.append(low >= high)
    return blind


def _where(mask: np.ndarray) -> str:
    return f"{int(mask.sum())} of {mask.size}, first {tuple(map(int, np.argwhere(mask)[0]))},"
