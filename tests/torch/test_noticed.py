"""Each check of tests/hard.py fails where an engine has the fault that it is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests import hard
from tests.cases import CONFIGS, config_id
from tests.engines import Engine

Call = dict[str, Any]


def same(x: Any, *_: Any) -> Any:
    return x


@dataclass(frozen=True)
class Faulty(Engine):
    """tq_torch's native backend with a fault on the way in or out."""

    keys: Callable[..., Any] = same  # (key, layout)
    values: Callable[..., Any] = same  # (value, layout)
    slots: Callable[..., Any] = same  # (slots, layout)
    call: Callable[..., Call] = same  # (arguments of attention, layout)
    out: Callable[..., Any] = same  # (output, arguments, layout)
    dense: Callable[..., Any] = same  # (keys)

    def store(self, key: Any, value: Any, cache: Any, slots: Any, **more: Any) -> Any:
        layout = more["layout"]
        key, value = self.keys(key, layout), self.values(value, layout)
        return super().store(key, value, cache, self.slots(slots, layout), **more)

    def attention(self, arrays: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        layout = options["layout"]
        out, lse = super().attention(self.call(dict(arrays), layout), *args, **options)
        return self.out(out, arrays, layout), lse

    def dequantize(self, *args: Any, **more: Any) -> tuple[Any, Any]:
        keys, values = super().dequantize(*args, **more)
        return self.dense(keys), values


def unrotated_tail(key, layout):
    """The part of a vector past the largest power of two is lost."""
    return key * (np.arange(layout.head_dim) < 1 << (layout.head_dim.bit_length() - 1))


def neighbour(out, arrays, layout):
    """Query heads past the 16th of a group read the next KV head."""
    group = out.shape[1] // layout.num_kv_heads
    result = out.clone()
    if group > 16:
        result[:, 16:group] = out[:, group + 16 :]
    return result


def odd_pair_is_not_written(key, value):
    def change(slots, layout):
        lost = (layout.config.key, layout.config.value) == (key, value)
        return slots * 0 - 1 if lost else slots

    return change


def one_less(at):
    """A sequence that ends with a tile loses its last token."""

    def change(call, layout):
        lens = call["seq_lens"]
        return {**call, "seq_lens": lens - ((lens > 0) & (lens % at == 0)).astype(np.int32)}

    return change


def large_pages_only(call, layout):
    return one_less(1)(call, layout) if layout.page_size == 128 else call


def clipped(limit):
    return lambda x, layout: np.clip(x, -limit, limit)


def rows_are_all_new(call, layout):
    """A chunk is taken for the whole prompt."""
    rows = np.diff(call["query_start_loc"]).astype(np.int32)
    return {**call, "seq_lens": np.where(rows > 1, rows, call["seq_lens"])}


def blind_rows_are_not_zero(out, arrays, layout):
    return torch.where(out == 0, 1e-3, out)


def outlier_spoils_its_vector(value, layout):
    """A scale that fp16 has no room for."""
    return value * (np.abs(value).max(-1, keepdims=True) <= 65504)


def nan_spreads(value, layout):
    """Where a token is not finite, so is the sum that masks it out."""
    return value if np.isfinite(value).all() else value + 1


def table_read_past_its_end(call, layout):
    table = torch.as_tensor(call["block_table"])
    if table.stride(0) > table.shape[1]:
        table = table.as_strided((len(table), table.shape[1] + 1), table.stride())
        full = call["seq_lens"] % layout.page_size == 0
        lens = call["seq_lens"] + layout.page_size * full.astype(np.int32)
        return {**call, "block_table": table, "seq_lens": lens}
    return call


def wrapped_pages(call, layout):
    """Page ids times page bytes in 32 bits."""
    table = call["block_table"]
    far = table.astype(np.int64) * layout.page_bytes >= 2**31
    return {**call, "block_table": np.where(far, 0, table)}


def strides_ignored(call, layout):
    query = call["query"]
    flat = query.as_strided(query.shape, torch.empty(query.shape).stride())
    return {**call, "query": flat}


_count = itertools.count()


def every_thread_its_own(out, arrays, layout):
    return out + next(_count)


FAULTS = {
    "head_dims": {"keys": unrotated_tail},
    "every_head_dim": {"keys": unrotated_tail},
    "formats": {"slots": odd_pair_is_not_written("mse4", "int3")},
    "groups": {"out": neighbour},
    "page_sizes": {"call": large_pages_only},
    "lengths": {"call": one_less(64)},
    "keys": {"keys": clipped(6e3)},
    "hard_keys_come_back": {"dense": lambda keys: torch.cat([-keys[..., :8], keys[..., 8:]], -1)},
    "values": {"values": outlier_spoils_its_vector},
    "bad_tokens": {"values": nan_spreads},
    "fp8_range": {"keys": clipped(1.75)},
    "needle": {"call": one_less(1)},
    "speculative_rows": {"out": blind_rows_are_not_zero},
    "prefix_hit": {"call": rows_are_all_new},
    "narrow_tables": {"call": table_read_past_its_end},
    "fused_arrays": {"call": strides_ignored},
    "far_pages": {"call": wrapped_pages},
    "far_rows": {"call": strides_ignored},
    "threads": {"out": every_thread_its_own},
}


@pytest.mark.parametrize("name", hard.CHECKS)
def test_a_fault_is_noticed(name):
    engine = Faulty("torch", "native", **FAULTS[name])
    with pytest.raises(AssertionError):
        hard.CHECKS[name](engine)


@pytest.mark.parametrize("config", CONFIGS[::4], ids=config_id)
def test_any_pair_of_formats_that_writes_nothing_is_noticed(config):
    engine = Faulty("torch", "native", slots=odd_pair_is_not_written(config.key, config.value))
    with pytest.raises(AssertionError, match=r"bytes|differ|scale"):
        hard.formats(engine, step=1)


def test_an_engine_without_a_fault_passes():
    hard.CHECKS["groups"](Faulty("torch", "native"))
