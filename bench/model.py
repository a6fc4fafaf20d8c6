"""A decode step of a whole Llama on a GPU: the packed cache beside bf16 attention.

The weights are random, the shapes those of Llama-3-8B: embedding, then in each layer RMSNorm, QKV,
rotary embedding, store of the new token, attention, output projection and MLP, at last norm, logits
and argmax, in plain PyTorch calls captured in a CUDA graph. Each layer has its own weights and its
own cache, which is full: the new token is the last of ``L``. The 16-bit peers read a contiguous
bf16 cache without padding; ratios are to the fastest of them.

Before anything is timed, the logits of a small model, decoded token by token, are compared with
those over a bf16 cache of the same history. A row without times says that its cache and the weights
do not fit into the device's memory together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tq_torch
from bench import gpu
from bench.providers import SDPA
from bench.timing import print_table
from tq_core import CacheLayout, QuantConfig

HELP = "a decode step of a whole model on a GPU beside bf16 attention"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "provider", "preset", "dtype",
    "layers", "B", "L", "Hk", "g", "D", "page_size", "us_median", "us_spread", "tokens_per_second",
    "cache_bytes", "ratio_to_bf16",
)  # fmt: skip
OURS = "tq_torch"
#: Preset of the small model whose logits are compared.
GATE_PRESET = "k8v8"
GATE_STEPS = 20
#: Largest relative error of its logits: those of bf16 and of the new tokens' formats.
TOLERANCE = 1.5e-2
ROPE_THETA = 500000.0
EPSILON = 1e-5

#: What a model calls in a layer: stores key and value ``[B, Hk, D]``, attends with the query.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Config(NamedTuple):
    """Sizes of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    def shape(self, batch: int, length: int) -> gpu.Shape:
        """The shape of a layer's attention."""
        return gpu.Shape(batch, length, self.kv_heads, self.heads // self.kv_heads, self.head_dim)


LLAMA = Config(32, 4096, 32, 8, 128, 14336, 128256)


class Job(NamedTuple):
    """Caches of all layers to time; ``preset`` empty: contiguous bf16 ones."""

    config: Config
    shape: gpu.Shape
    preset: str
    page_size: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of the tokens in all layers."""
        shape = self.shape
        if not self.preset:
            return self.config.layers * shape.bf16_bytes
        layout = CacheLayout(QuantConfig.preset(self.preset), shape.Hk, shape.D, self.page_size)
        return self.config.layers * shape.B * shape.L * layout.bytes_per_token


class Layer(NamedTuple):
    """Weights of a layer: matrices ``[out, in]``, scales of the norms ``[width]``."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """A Llama with random bf16 weights; ``model(ids, length, attend)`` decodes a token each."""

    def __init__(self, config: Config):
        generator = torch.Generator(device=gpu.DEVICE).manual_seed(2)

        def matrix(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device=gpu.DEVICE)
            return made.normal_(std=columns**-0.5, generator=generator)

        def ones() -> Tensor:
            return torch.ones(width, dtype=torch.bfloat16, device=gpu.DEVICE)

        self.config = config
        width, dim = config.width, config.head_dim
        rows = config.heads * dim
        self.embedding = matrix(config.vocab, width).mul_(width**0.5)
        self.layers = [
            Layer(
                ones(), matrix(rows + 2 * config.kv_heads * dim, width), matrix(width, rows),
                ones(), matrix(2 * config.mlp, width), matrix(width, config.mlp),
            )
            for _ in range(config.layers)
        ]  # fmt: skip
        self.norm, self.head = ones(), matrix(config.vocab, width)
        exponents = torch.arange(0, dim, 2, device=gpu.DEVICE) / dim
        self.inv_freq = ROPE_THETA**-exponents

    def __call__(self, ids: Tensor, length: int, attend: Attend) -> Tensor:
        """Logits ``[B, vocab]`` of ids ``[B]``, each the last of ``length`` tokens."""
        heads, kv_heads, dim = self.config[2:5]
        angle = self.inv_freq * (length - 1)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        cos, sin = torch.cat((cos, cos)), torch.cat((-sin, sin))
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = F.linear(norm(x, layer.attention_norm), layer.qkv).view(len(x), -1, dim)
            turned, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
            turned = torch.addcmul(turned * cos, turned.roll(dim // 2, -1), sin)
            query, key = turned[:, :heads], turned[:, heads:]
            x.addmm_(attend(index, query, key, value).flatten(1), layer.out.t())
            gate, up = F.linear(norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x.addmm_(F.silu(gate) * up, layer.down.t())
        return F.linear(norm(x, self.norm), self.head)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of rows ``[B, width]``."""
    return F.rms_norm(x, weight.shape, weight, EPSILON)


def dense(length: int, caches: Sequence[Tensor], backend: SDPBackend) -> Attend:
    """The first ``length`` tokens of contiguous caches ``[2, B, Hk, L, D]``, one a layer."""
    position = torch.tensor([length - 1], device=gpu.DEVICE)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for cache, new in zip(caches[layer], (key, value), strict=True):
            cache.index_copy_(2, position, new[:, :, None])
        keys, values = caches[layer][:, :, :, :length]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]

    return attend


def packed(length: int, data: gpu.Cache, caches: Sequence[Tensor]) -> Attend:
    """The first ``length`` tokens of packed caches, one a layer, that share a block table."""
    page, slot = divmod(length - 1, data.layout.page_size)
    slots = data.table[:, page].long() * data.layout.page_size + slot
    lens = torch.full_like(data.lens, length)
    what: dict[str, Any] = {"layout": data.layout, "codec": data.codec, "backend": gpu.BACKEND}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tq_torch.store(key, value, caches[layer], slots, **what)
        out = tq_torch.decode_attention(query, caches[layer], data.table, lens, **what)
        return cast(Tensor, out)

    return attend


def make_ids(model: Model, *size: int) -> Tensor:
    """Random tokens."""
    generator = torch.Generator(device=gpu.DEVICE).manual_seed(3)
    return torch.randint(model.config.vocab, size, device=gpu.DEVICE, generator=generator)


def gate(config: Config, page_size: int) -> dict[str, float]:
    """Relative errors of a small model's logits by provider; a peer that refuses has none."""
    config = config._replace(
        layers=2, width=512, heads=4 * config.heads // config.kv_heads, kv_heads=4, mlp=1024,
        vocab=2048,
    )  # fmt: skip
    shape = config.shape(3, page_size * -(-64 // page_size) + 7)  # the last pages begin in a step
    data = gpu.make_cache(shape, GATE_PRESET, page_size, None, fill=True)
    pair = torch.stack(gpu.dense(data, shape.L, torch.bfloat16, range(shape.B)))
    model = Model(config)
    ids = make_ids(model, GATE_STEPS, shape.B)

    def logits(make: Callable[[int], Attend]) -> Tensor:
        lengths = range(shape.L - GATE_STEPS + 1, shape.L + 1)
        return torch.stack([model(i, n, make(n)) for i, n in zip(ids, lengths, strict=True)])

    def over(backend: SDPBackend) -> Tensor:
        caches = [pair.clone() for _ in range(config.layers)]
        return logits(partial(dense, caches=caches, backend=backend))

    want = over(SDPBackend.MATH)
    caches = [data.cache.clone() for _ in range(config.layers)]
    have = logits(partial(packed, data=data, caches=caches))
    errors = {OURS: gpu.relative_error(have, want)}
    for backend, name in SDPA.items():
        try:
            errors[name] = gpu.relative_error(over(backend), want)
        except RuntimeError:
            continue
    return errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, listed, positive = parser.add_argument, gpu.listed, gpu.positive
    numbers: dict[str, Any] = {"type": listed(positive), "metavar": "NUMBERS"}
    add("--presets", type=listed(gpu.preset), default="4bit,k8v4,3bit", help="comma-separated")
    add("--batch", default="1,16,64", help="sequences, comma-separated", **numbers)
    add("--lengths", default="8192,32768,131072", help="tokens of each, comma-separated", **numbers)
    add("--most-tokens", type=positive, default=2**21, help="leaves out larger batches")
    add("--page-size", type=positive, default=64, help="tokens a page")
    add("--layers", type=positive, default=LLAMA.layers, help="layers of the model")
    add("--rounds", type=rounds, default=8, help="replays of three steps timed, >= 2")
    add("--jobs", type=positive, default=14, help="processes that compile")
    add("--csv", type=Path, default=gpu.RESULTS / "model.csv", help="rows go here")
    add("--commit", default=None, help="recorded; default: asked of git")


def rounds(text: str) -> int:
    """How often a graph is timed: a step is long, so that few replays give a median."""
    if gpu.positive(text) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {text!r}")
    return int(text)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    config = LLAMA._replace(layers=arguments.layers)
    shapes = [
        config.shape(batch, length)
        for batch in arguments.batch
        for length in arguments.lengths
        if batch * length <= arguments.most_tokens
    ]
    if not shapes:
        print(f"no batch has at most {arguments.most_tokens} tokens")
        return 2
    page_size = arguments.page_size
    errors = gate(config, page_size)
    print(f"logits of a small model, tq_torch's with {GATE_PRESET}, against SDPA without a kernel")
    for name, error in errors.items():
        print(f"{name}: relative error {error:.2e}, expected at most {TOLERANCE:g}")
    if not errors[OURS] <= TOLERANCE:
        print("nothing was timed or written")
        return 1
    peers = {b: name for b, name in SDPA.items() if errors.get(name, 0.0) <= TOLERANCE}
    jobs = [Job(config, s, preset, page_size) for s in shapes for preset in arguments.presets]
    largest = max(s.L * s.Hk * s.D for s in shapes)
    gpu.in_workers(warm, jobs, arguments.jobs, 4 * largest + 2**28)
    model = Model(config)
    environment = gpu.environment(arguments.commit)
    for shape in shapes:
        skipped: dict[str, str] = {}
        rows = []
        for job in [Job(config, shape, "", page_size), *(j for j in jobs if j.shape == shape)]:
            rows += measure(model, job, peers, arguments.rounds, skipped)
            torch.cuda.empty_cache()
        show(shape, with_ratios(rows))
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
        gpu.append_csv(arguments.csv, [{**environment, **row} for row in rows], COLUMNS)
    return 0


@torch.inference_mode()
def warm(job: Job) -> str | None:
    """Compiles what a run of ``job`` needs, in a process of its own."""
    try:
        data = gpu.make_cache(job.shape, job.preset, job.page_size, None, fill=False)
        model = Model(job.config._replace(layers=1, mlp=64, vocab=64))
        model(make_ids(model, job.shape.B), job.shape.L, packed(job.shape.L, data, [data.cache]))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.preset}, {job.shape}: {gpu.reason_of(error)}"
    return None


def runs_of(model: Model, job: Job, peers: Mapping[SDPBackend, str]) -> list[gpu.Run]:
    """Steps over new caches: one, or over bf16 caches one of each peer."""
    shape, layers = job.shape, range(1, job.config.layers)
    if job.preset:
        data = gpu.make_cache(shape, job.preset, job.page_size, None, fill=True)
        caches = [data.cache, *(data.cache.clone() for _ in layers)]
        attends = {OURS: packed(shape.L, data, caches)}
    else:
        size = (2, shape.B, shape.Hk, shape.L, shape.D)
        both = torch.empty(size, dtype=torch.bfloat16, device=gpu.DEVICE).normal_()
        caches = [both, *(both.clone() for _ in layers)]
        attends = {name: dense(shape.L, caches, backend) for backend, name in peers.items()}
    ids = make_ids(model, shape.B)

    def step(attend: Attend) -> Tensor:
        return model(ids, shape.L, attend).argmax(-1)

    size_of_page = job.page_size if job.preset else ""
    fields = {"preset": job.preset, "dtype": "bfloat16", "page_size": size_of_page, "order": ""}
    return [
        gpu.Run(name, [partial(step, attend)], job.cache_bytes, fields)
        for name, attend in attends.items()
    ]


def measure(
    model: Model,
    job: Job,
    peers: Mapping[SDPBackend, str],
    rounds: int,
    skipped: dict[str, str],
) -> list[dict[str, Any]]:
    """Rows of a job's providers; of those that cannot be captured, ``skipped`` gets the reason.

    Where the caches do not fit into the memory, the times are empty.
    """
    row = {
        "preset": job.preset, "dtype": "bfloat16", "layers": job.config.layers,
        **job.shape._asdict(), "page_size": job.page_size if job.preset else "",
        "cache_bytes": job.cache_bytes,
    }  # fmt: skip
    blank = dict.fromkeys(("us_median", "us_spread", "tokens_per_second"), "")
    names = [OURS] if job.preset else list(peers.values())
    try:
        timed = gpu.time_runs(runs_of(model, job, peers), rounds, skipped)
    except torch.OutOfMemoryError:
        return [{**row, **blank, "provider": name} for name in names]
    return [
        {
            **row, "provider": run.provider, "us_median": timing.median,
            "us_spread": timing.spread, "tokens_per_second": 1e6 * job.shape.B / timing.median,
        }
        for run, timing in timed
    ]  # fmt: skip


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the speed in units of the fastest bf16 provider's."""
    timed = [r for r in rows if r["us_median"] != ""]
    best = min((r["us_median"] for r in timed if not r["preset"]), default=None)
    for row in rows:
        known = best is not None and row["us_median"] != ""
        row["ratio_to_bf16"] = best / row["us_median"] if known else ""
    return rows


def show(shape: gpu.Shape, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows of one shape."""
    print("\n" + ", ".join(f"{name}={size}" for name, size in shape._asdict().items()))
    lines: list[tuple[str, ...]] = []
    for row in rows:
        name = " ".join(filter(None, (row["provider"], row["preset"] or row["dtype"])))
        gigabytes = f"{row['cache_bytes'] / 1e9:.2f}"
        if row["us_median"] == "":
            lines.append((name, "skipped: out of memory", "", "", gigabytes, ""))
            continue
        times = f"{row['us_median']:.0f}", f"{row['us_spread']:.0f}"
        ratio = row["ratio_to_bf16"]
        speed = f"{row['tokens_per_second']:.1f}"
        lines.append((name, *times, speed, gigabytes, f"{ratio:.2f}" if ratio != "" else ""))
    print_table(("", "us", "25-75 %", "tokens/s", "cache GB", "x bf16"), lines)
