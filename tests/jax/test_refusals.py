"""What the public functions refuse, and how they say it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import PRESET_CONFIGS
from tq_core import CacheLayout, Codec

LAYOUT = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
CODEC = Codec(LAYOUT.config, 64)
F32, I32 = jnp.float32, jnp.int32


def store_arguments():
    return {
        "key": jnp.ones((3, 2, 64)),
        "value": jnp.ones((3, 2, 64)),
        "cache": tq_jax.empty_cache(LAYOUT, 4),
        "slot_mapping": jnp.arange(3, dtype=I32),
        "layout": LAYOUT,
        "codec": CODEC,
    }


def attention_arguments():
    return {
        "query": jnp.ones((3, 8, 64)),
        "cache": tq_jax.empty_cache(LAYOUT, 4),
        "block_table": jnp.zeros((2, 2), I32),
        "seq_lens": jnp.full(2, 5, I32),
        "query_start_loc": jnp.array([0, 1, 3], I32),
        "layout": LAYOUT,
        "codec": CODEC,
    }


def decode_arguments():
    arguments = attention_arguments()
    del arguments["query_start_loc"]
    return {**arguments, "query": jnp.ones((2, 8, 64))}


def dequantize_arguments():
    names = ("cache", "block_table", "seq_lens", "layout", "codec")
    arguments = attention_arguments()
    return {**{n: arguments[n] for n in names}, "dtype": F32}


def merge_arguments():
    out, lse = jnp.ones((3, 8, 64)), jnp.zeros((3, 8))
    return {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}


def empty_cache_arguments():
    return {"layout": LAYOUT, "num_pages": 4}


ARGUMENTS = {
    "store": store_arguments,
    "attention": attention_arguments,
    "decode_attention": decode_arguments,
    "dequantize": dequantize_arguments,
    "merge_attention_states": merge_arguments,
    "empty_cache": empty_cache_arguments,
}

OTHER_CONFIG = PRESET_CONFIGS["3bit"]
#: (function, what is changed, error, the message's beginning, what it also says)
REFUSED = [
    ("empty_cache", {"layout": "4bit"}, TypeError, "layout", "CacheLayout"),
    ("empty_cache", {"num_pages": 1.5}, TypeError, "num_pages", "1.5"),
    ("empty_cache", {"num_pages": True}, TypeError, "num_pages", "int"),
    ("empty_cache", {"num_pages": -1}, ValueError, "num_pages", "at least 0"),
    (
        "empty_cache",
        {"layout": CacheLayout(LAYOUT.config, 128, 128, 1 << 17)},
        ValueError,
        "layout",
        "2 GiB",
    ),
    ("store", {"key": [[[0.0] * 64] * 2] * 3}, TypeError, "key", "list"),
    ("store", {"key": np.ones((3, 2, 64))}, TypeError, "key", "float64"),
    ("store", {"key": jnp.ones((3, 2, 64), I32)}, TypeError, "key", "int32"),
    ("store", {"key": jnp.ones((3, 2, 32))}, ValueError, "key", "(3, 2, 32)"),
    ("store", {"value": jnp.ones((4, 2, 64))}, ValueError, "value", "(4, 2, 64)"),
    ("store", {"cache": jnp.zeros((4, 16, 2, 71), jnp.uint8)}, ValueError, "cache", "70"),
    ("store", {"cache": jnp.zeros((4, 16, 2, 70), jnp.int8)}, ValueError, "cache", "int8"),
    ("store", {"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping", "list"),
    ("store", {"slot_mapping": jnp.zeros(3)}, TypeError, "slot_mapping", "float32"),
    ("store", {"slot_mapping": jnp.zeros(4, I32)}, ValueError, "slot_mapping", "(4,)"),
    ("store", {"layout": None}, TypeError, "layout", "NoneType"),
    ("store", {"codec": LAYOUT}, TypeError, "codec", "CacheLayout"),
    ("store", {"codec": Codec(OTHER_CONFIG, 64)}, ValueError, "codec", "mse3"),
    ("store", {"codec": Codec(LAYOUT.config, 72)}, ValueError, "codec", "72"),
    (
        "store",
        {"codec": Codec(LAYOUT.config, 64, key_offset=np.ones((3, 64)))},
        ValueError,
        "codec",
        "3",
    ),
    ("store", {"backend": "cuda"}, ValueError, "backend", "'cuda'"),
    ("store", {"backend": "interpret"}, ValueError, "backend", "cannot serve"),
    ("attention", {"query": jnp.ones((3, 7, 64))}, ValueError, "query", "7 query heads"),
    ("attention", {"query": jnp.ones((3, 258, 64))}, ValueError, "query", "128"),
    ("attention", {"query": jnp.ones((3, 8, 63))}, ValueError, "query", "63"),
    ("attention", {"query": jnp.ones((8, 64))}, ValueError, "query", "(8, 64)"),
    ("attention", {"query": np.ones((3, 8, 64))}, TypeError, "query", "float64"),
    ("attention", {"query": 1.0}, TypeError, "query", "float"),
    ("attention", {"cache": np.zeros((4, 16, 2, 70))}, ValueError, "cache", "float64"),
    ("attention", {"block_table": [[0, 0], [0, 0]]}, TypeError, "block_table", "list"),
    ("attention", {"block_table": np.zeros((2, 2), int)}, TypeError, "block_table", "int64"),
    ("attention", {"block_table": jnp.zeros((3, 2), I32)}, ValueError, "block_table", "(3, 2)"),
    ("attention", {"seq_lens": [5, 5]}, TypeError, "seq_lens", "list"),
    ("attention", {"seq_lens": np.array([5, 5])}, TypeError, "seq_lens", "int64"),
    ("attention", {"query_start_loc": None}, TypeError, "query_start_loc", "NoneType"),
    ("attention", {"query_start_loc": jnp.zeros(2, I32)}, ValueError, "query_start_loc", "(2,)"),
    ("attention", {"sinks": [0.0] * 8}, TypeError, "sinks", "list"),
    ("attention", {"sinks": jnp.zeros(2)}, ValueError, "sinks", "(2,)"),
    ("attention", {"sinks": jnp.zeros(8, jnp.bfloat16)}, TypeError, "sinks", "bfloat16"),
    ("attention", {"alibi_slopes": jnp.zeros((8, 1))}, ValueError, "alibi_slopes", "(8, 1)"),
    ("attention", {"alibi_slopes": 0.5}, TypeError, "alibi_slopes", "float"),
    ("attention", {"scale": "1"}, TypeError, "scale", "str"),
    ("attention", {"scale": jnp.float32(1)}, TypeError, "scale", "static"),
    ("attention", {"scale": float("nan")}, ValueError, "scale", "nan"),
    ("attention", {"softcap": 0.0}, ValueError, "softcap", "0.0"),
    ("attention", {"softcap": jnp.ones(())}, TypeError, "softcap", "static"),
    ("attention", {"sliding_window": 0}, ValueError, "sliding_window", "None means no window"),
    ("attention", {"sliding_window": 2.0}, TypeError, "sliding_window", "2.0"),
    ("attention", {"sliding_window": jnp.int32(2)}, TypeError, "sliding_window", "static"),
    ("attention", {"causal": 1}, TypeError, "causal", "bool"),
    ("attention", {"causal": jnp.array(True)}, TypeError, "causal", "static"),
    ("attention", {"return_lse": 1}, TypeError, "return_lse", "bool"),
    ("attention", {"return_lse": jnp.array(True)}, TypeError, "return_lse", "static"),
    ("attention", {"max_query_len": -1}, ValueError, "max_query_len", "-1"),
    ("attention", {"max_query_len": jnp.int32(3)}, TypeError, "max_query_len", "static"),
    ("attention", {"max_seq_len": 2.5}, TypeError, "max_seq_len", "2.5"),
    ("attention", {"max_seq_len": jnp.int32(3)}, TypeError, "max_seq_len", "static"),
    ("attention", {"num_kv_splits": 0}, ValueError, "num_kv_splits", "0"),
    ("attention", {"plan": {"deterministic": "batch"}}, ValueError, "plan", "takes no plan"),
    ("attention", {"plan": {"deterministic": "run"}}, ValueError, "plan", "'run'"),
    ("attention", {"plan": {"block_t": jnp.int32(64)}}, TypeError, "plan", "block_t to be an int"),
    ("attention", {"backend": "triton"}, ValueError, "backend", "cannot serve"),
    ("decode_attention", {"query": jnp.ones((3, 8, 64))}, ValueError, "query", "query_start_loc"),
    ("decode_attention", {"max_query_len": 2}, ValueError, "max_query_len", "2"),
    ("decode_attention", {"scale": jnp.float32(1)}, TypeError, "scale", "static"),
    ("dequantize", {"dtype": jnp.int8}, ValueError, "dtype", "int8"),
    ("dequantize", {"dtype": "half a float"}, TypeError, "dtype", "half a float"),
    ("dequantize", {"dtype": None}, TypeError, "dtype", "None"),
    ("dequantize", {"dtype": "float64"}, ValueError, "dtype", "float64"),
    ("dequantize", {"seq_lens": 5}, TypeError, "seq_lens", "int"),
    ("dequantize", {"block_table": jnp.zeros(2, I32)}, ValueError, "block_table", "(2,)"),
    ("dequantize", {"backend": "pallas"}, ValueError, "backend", "cannot serve"),
    ("merge_attention_states", {"out_b": jnp.ones((3, 8, 65))}, ValueError, "out_b", "65"),
    (
        "merge_attention_states",
        {"out_b": jnp.ones((3, 8, 64), jnp.float16)},
        TypeError,
        "out_b",
        "float16",
    ),
    ("merge_attention_states", {"lse_a": jnp.zeros((8, 3))}, ValueError, "lse_a", "(8, 3)"),
    ("merge_attention_states", {"lse_b": [0.0]}, TypeError, "lse_b", "list"),
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_that_are_changed_below_are_right(name):
    shapes = jax.tree.map(
        np.shape, jax.eval_shape(lambda: getattr(tq_jax, name)(**ARGUMENTS[name]()))
    )
    assert jax.tree.leaves(shapes)


@pytest.mark.parametrize(
    "name, change, error, start, also", REFUSED, ids=[f"{r[0]}-{r[3]}-{r[4]}" for r in REFUSED]
)
def test_refusal(name, change, error, start, also):
    with pytest.raises(error) as caught:
        getattr(tq_jax, name)(**{**ARGUMENTS[name](), **change})
    message = str(caught.value)
    assert message.startswith(start)
    assert also in message


@pytest.mark.parametrize(
    "name, value",
    [("scale", 1.0), ("softcap", 1.0), ("sliding_window", 4), ("causal", True), ("max_seq_len", 9)],
)
def test_a_traced_option_is_refused(name, value):
    @jax.jit
    def call(option):
        return tq_jax.attention(**attention_arguments(), **{name: option})

    with pytest.raises(TypeError, match=f"^{name}: .*static.*functools.partial"):
        call(value)


def test_all_reasons_of_a_backend_are_given():
    with pytest.raises(ValueError, match=r"cuda and hip devices, not on cpu; .*jax"):
        tq_jax.store(**store_arguments(), backend="triton")


def test_a_device_by_name():
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
    with pytest.raises(TypeError, match=r"device: expected a jax.Device.*jax.devices\('cpu'\)"):
        tq_jax.empty_cache(layout, 2, device="cpu")
