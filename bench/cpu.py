"""Decode attention on the CPU: the native backend, SDPA on an uncompressed cache, naive unpacking.

The packed and the uncompressed cache hold the same tokens. Results are checked against the numpy
reference before anything is timed. With ``--limit`` the exit status tells whether native decode
kept to it, which on a machine that does other work means little.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tq_torch
from bench.timing import fork_join, print_table, side_by_side
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig, reference
from tq_core.layout import ORDERS

HELP = "decode attention on the CPU beside torch SDPA"
TOLERANCE = 1e-3
#: A parallel step that takes longer than this waits for a core that other work holds.
BUSY_MS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="4bit", choices=sorted(PRESETS), help="formats")
    parser.add_argument("--order", default=None, choices=ORDERS, help="byte order of a page")
    parser.add_argument("--seq-len", type=int, default=8192, help="cached tokens")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads a KV head")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=41, help="calls timed")
    parser.add_argument("--limit", type=float, help="largest ratio to SDPA that passes")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    layout = CacheLayout(
        QuantConfig.preset(arguments.preset),
        arguments.kv_heads,
        arguments.head_dim,
        arguments.page_size,
        arguments.order,
    )
    codec = Codec(layout.config, layout.head_dim)
    length, heads = arguments.seq_len, arguments.kv_heads
    generator = torch.Generator().manual_seed(0)
    shape = (length, heads, layout.head_dim)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn((1, heads * arguments.group, layout.head_dim), generator=generator)
    num_pages = -(-length // layout.page_size)
    pages = torch.randperm(num_pages, generator=generator)
    cache = tq_torch.empty_cache(layout, num_pages).fill_(255)
    token = torch.arange(length)
    slots = pages[token // layout.page_size] * layout.page_size + token % layout.page_size
    tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
    table, seq_lens = pages[None].int(), torch.tensor([length], dtype=torch.int32)
    what = {"layout": layout, "codec": codec}

    dense = tq_torch.dequantize(cache, table, seq_lens, dtype=torch.float32, **what)
    dense_key, dense_value = (x[:, :length].transpose(1, 2).contiguous() for x in dense)

    def sdpa(key: Tensor = dense_key, value: Tensor = dense_value) -> Tensor:
        out = scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)
        return out[:, :, 0]

    functions: dict[str, Callable[[], Tensor]] = {
        "torch SDPA, fp32 cache": sdpa,
        f"tq native, {arguments.preset}": lambda: tq_torch.decode_attention(
            query, cache, table, seq_lens, backend="native", **what
        ),
        "unpack bit by bit, SDPA": lambda: sdpa(*unpack(cache, pages, length, **what)),
    }
    expected = reference.attention(
        query.numpy(),
        cache.numpy(),
        table.numpy(),
        seq_lens.numpy(),
        np.array([0, 1], np.int32),
        **what,
    )
    for name, function in functions.items():
        error = np.linalg.norm(function().numpy() - expected) / np.linalg.norm(expected)
        if not error <= TOLERANCE:
            print(f"{name}: relative error {error:.2e} exceeds {TOLERANCE:g}; nothing was timed")
            return 1

    delays = [fork_join()]
    timings = side_by_side(functions, arguments.rounds)
    delays.append(fork_join())
    base = timings["torch SDPA, fp32 cache"].median
    sizes = (8 * layout.head_dim * heads, layout.bytes_per_token, layout.bytes_per_token)
    print(
        f"decode, B=1, L={length}, Hk={heads}, g={arguments.group}, D={layout.head_dim}, "
        f"P={layout.page_size}, order {layout.order}"
    )
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {platform.machine()}, "
        f"median of {arguments.rounds} and quartiles"
    )
    print(f"a parallel step takes at least {max(delays):.2f} ms before and after\n")
    print_table(
        ("", "ms", "25-75 %", "x SDPA", "cache MB"),
        [
            (
                name,
                f"{t.median:.1f}",
                f"{t.low:.1f}-{t.high:.1f}",
                f"{t.median / base:.2f}",
                f"{size * length / 1e6:.1f}",
            )
            for (name, t), size in zip(timings.items(), sizes, strict=True)
        ],
    )
    ratio = timings[f"tq native, {arguments.preset}"].median / base
    limit = "" if arguments.limit is None else f", limit {arguments.limit:g}x"
    print(f"\nnative takes {ratio:.2f}x SDPA's time{limit}")
    if max(delays) > BUSY_MS:
        print("other work holds the cores, so these times mean little: run it again on an idle one")
    return 0 if arguments.limit is None or ratio <= arguments.limit else 1


def unpack(
    cache: Tensor, pages: Tensor, length: int, *, layout: CacheLayout, codec: Codec
) -> tuple[Tensor, Tensor]:
    """What comes to mind first: the whole cache to fp32 ``[1, Hk, L, D]``, one bit at a time."""
    flat = cache[pages].flatten(1)
    config = layout.config

    def codes(index: np.ndarray, bits: int) -> Tensor:
        data = flat[:, torch.tensor(index)].flatten(0, 1)  # [tokens, Hk, bytes]
        stream = (data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)
        stream = stream[..., : bits * layout.head_dim].unflatten(-1, (-1, bits)).int()
        return (stream << torch.arange(bits, dtype=torch.int32)).sum(-1)

    low = torch.tensor(layout.meta_index())
    fields = torch.stack([flat[:, low], flat[:, low + 1]], -1).view(torch.float16)
    fields = fields.squeeze(-1).flatten(0, 1).float()[..., None]  # [tokens, Hk, F, 1]
    rotation = torch.tensor(codec.rotation)
    key = codes(layout.key_index(), config.key_bits)
    if config.key_is_codebook:
        key = torch.tensor(codec.centroids)[key] * fields[:, :, 0] @ rotation
    else:
        key = key.to(torch.uint8).view(torch.float8_e4m3fn).float()
    value = codes(layout.value_index(), config.value_bits)
    if config.value_is_codebook:
        value = torch.tensor(codec.value_centroids)[value] * fields[:, :, -1] @ rotation
    else:
        value = value * fields[:, :, -2] + fields[:, :, -1]
    key, value = (x[:length].transpose(0, 1)[None].contiguous() for x in (key, value))
    return key, value
