"""A cache's file goes from framework to framework, and what is in it stays the same."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

import tq_core
import tq_jax
import tq_torch
from tq_core import CacheLayout, Codec, QuantConfig

PACKAGES = {
    "numpy": (tq_core, np.array),
    "torch": (tq_torch, lambda x: torch.from_numpy(np.array(x))),
    "jax": (tq_jax, jnp.asarray),
}


def contents(file):
    return [np.asarray(x) for x in (file.cache, file.block_table, file.seq_lens)]


@pytest.mark.parametrize("way", list(itertools.permutations(PACKAGES)), ids="-".join)
@pytest.mark.parametrize("preset, order", [("4bit", "planes"), ("3bit", "token"), ("k8v8", "head")])
def test_from_each_to_the_next(preset, order, way, rng, tmp_path):
    layout = CacheLayout(QuantConfig.preset(preset), 3, 72, 5, order)
    what = {"layout": layout, "codec": Codec(layout.config, 72)}
    cache = rng.integers(0, 256, layout.shape(12), np.uint8)
    table = np.array([[4, 11, 3], [0, 7, -1]], np.int32)
    lens = np.array([15, 8], np.int32)
    pages = [11, 3, 4, 7, 0]
    arrays = [cache, table, lens]
    data = set()
    for step, name in enumerate(way):
        package, array = PACKAGES[name]
        mine, table_, lens_ = (array(x) for x in arrays)
        path = tmp_path / name
        some = {} if step else {"pages": pages}
        package.save_cache(path, mine, **what, **some, block_table=table_, seq_lens=lens_)
        data.add(path.read_bytes())
        following, _ = PACKAGES[way[(step + 1) % 3]]
        arrays = contents(following.load_cache(path, **what))
    assert len(data) == 1
    assert np.array_equal(arrays[0], cache[pages])
    assert arrays[1].tolist() == [[2, 0, 1], [4, 3, -1]]
    assert arrays[2].tolist() == [15, 8]


def test_a_sequence_moves_from_torch_to_jax(rng, tmp_path):
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 8)
    what = {"layout": layout, "codec": Codec(layout.config, 64)}
    key, value = torch.from_numpy(rng.standard_normal((2, 20, 2, 64)).astype(np.float32))
    cache, table = tq_torch.empty_cache(layout, 6), torch.tensor([[5, 0, 2]], dtype=torch.int32)
    position = torch.arange(20)
    slots = table[0, position // 8] * 8 + position % 8
    tq_torch.store(key, value, cache, slots, **what)
    lens = torch.tensor([20], dtype=torch.int32)
    query = rng.standard_normal((1, 4, 64)).astype(np.float32)
    want = tq_torch.decode_attention(torch.from_numpy(query), cache, table, lens, **what)
    tq_torch.save_cache(
        tmp_path / "c", cache, **what, pages=table[0], block_table=table, seq_lens=lens
    )
    file = tq_jax.load_cache(tmp_path / "c", **what)
    free = jnp.array([3, 1, 7])
    other = tq_jax.empty_cache(layout, 8).at[free].set(file.cache)
    have = tq_jax.decode_attention(
        jnp.asarray(query), other, free[file.block_table], file.seq_lens, **what
    )
    np.testing.assert_allclose(have, want.numpy(), rtol=1e-4, atol=1e-5)
