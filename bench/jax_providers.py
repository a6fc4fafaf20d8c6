"""Providers in JAX, and their times; nothing here imports JAX before it is asked for.

What is timed is a whole public call, jitted by itself: the time that the device spends in its
kernels, copies and fills, as the profiler has it. Unlike the times of CUDA graphs it has no gaps
between kernels, which are longest where XLA launches them; ``bench frameworks`` shows both. The
calls are made in a row without waiting, each on the next copy of the cache, so that none is in the
L2 cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from bench import gpu
from bench.gpu import Cache, Item, Run, Shape, Timing
from bench.providers import PAGE, packed_run, paged, peer_run, random_pages

#: Calls before the ones that are timed.
WARMUP = 3
PALLAS = "Pallas paged attention"


def import_jax() -> ModuleType:
    """JAX, which takes device memory as it needs it and leaves the rest to torch."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def shared(tensor: Tensor) -> Any:
    """The tensor's memory as a JAX array."""
    return import_jax().dlpack.from_dlpack(tensor.contiguous())


def tq(query: Tensor, data: Cache, item: Item, caches: Sequence[Tensor]) -> Run:
    """The public function of tq_jax on the bytes of ``caches``."""
    jax = import_jax()
    import tq_jax

    attend = jax.jit(
        partial(
            tq_jax.decode_attention, layout=data.layout, codec=data.codec,
            max_seq_len=item.shape.L, backend=gpu.BACKEND,
            num_kv_splits=dict(item.overrides).get("num_splits"),
        )
    )  # fmt: skip
    rows, table, lens = map(shared, (query, data.table, data.lens))
    calls = [partial(attend, rows, shared(cache), table, lens) for cache in caches]
    return packed_run(query, data, item, calls, "tq_jax")._replace(is_jax=True)


def pallas(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Run:
    """The paged attention that comes with JAX, over 16-token pages in random order."""
    jax = import_jax()
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages = random_pages(shape)
    width = pages.shape[1]
    # Its defaults where they divide the pages of a sequence.
    splits = math.gcd(width, 16)
    options = {"k_splits": splits, "pages_per_compute_block": math.gcd(width // splits, 8)}

    def attend(query: Any, key: Any, value: Any, table: Any, lens: Any) -> Any:
        query = query * shape.D**-0.5  # it does not scale the scores
        interpret = gpu.DEVICE == "cpu"
        return paged_attention(query, key, value, table, lens, interpret=interpret, **options)

    lens = torch.full((shape.B,), shape.L, dtype=torch.int32, device=gpu.DEVICE)
    rows, table, lens = map(shared, (query, pages, lens))
    pair = [paged(x, pages, x.dtype, heads_first=True) for x in (key, value)]
    jitted = jax.jit(attend)
    calls = [partial(jitted, rows, *map(shared, x), table, lens) for x in gpu.rotation(*pair)]
    return peer_run(shape.bf16_bytes, calls, PALLAS, page_size=PAGE)._replace(is_jax=True)


def wait(result: object) -> None:
    """Until the device has done everything, ``result`` included."""
    jax = import_jax()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
    torch.cuda.synchronize()


def kernel_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Microseconds that the device is busy with each of ``calls``, which do the same.

    Raises:
        RuntimeError: the kernels seen do not divide evenly among the calls.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            result = call()
        wait(result)
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each, rest = divmod(len(events), len(calls))
    if rest or not each:
        raise RuntimeError(f"the profiler saw {len(events)} kernels of {len(calls)} equal calls")
    times = [e.time_range.elapsed_us() for e in events]
    return [sum(times[i : i + each]) for i in range(0, len(times), each)]


def time_runs(
    runs: Sequence[Run], rounds: int, skipped: dict[str, str]
) -> list[tuple[Run, Timing]]:
    """Times each run; the reason of what cannot be timed goes to ``skipped``."""
    timed = []
    for run in runs:
        try:
            times = kernel_times(list(islice(cycle(run.calls), WARMUP + rounds)))
            timed.append((run, gpu.timing_of(times[WARMUP:])))
        except Exception as error:
            skipped[gpu.name_of({"provider": run.provider, **run.fields})] = gpu.reason_of(error)
    return timed
