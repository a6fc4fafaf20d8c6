"""A decode step of a whole Llama on a GPU: the packed cache beside bf16 attention.

The weights are random, the shapes those of Llama-3-8B: embedding, then in each layer RMSNorm, QKV,
rotary embedding, store of the new token, attention, output projection and MLP, at last norm, logits
and argmax, in plain PyTorch calls captured in a CUDA graph. Each layer has its own weights and its
own cache, which is full: the new token is the last of ``L``. The 16-bit peers read a contiguous
bf16 cache without padding; ratios are to the fastest of them.

Before anything is timed, the logits of a small model, decoded token by token, are compared with
those over a bf16 cache of the same history. A row without times says that its cache and the weights
do not fit into the device's memory together. `peak_bytes` is what the timed steps had allocated at
most, weights and caches included; making these may have taken more.

Instead of one step at each ``--batch`` and length, ``--fit`` measures the largest batches that the
memory holds, ``--generate`` steps that feed their tokens back, ``--jax`` the same in JAX.
"""

from __future__ import annotations

import argparse
import gc
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
    "what", "layers", "B", "L", "Hk", "g", "D", "page_size", "us_median", "us_spread",
    "tokens_per_second", "cache_bytes", "peak_bytes", "ratio_to_bf16",
)  # fmt: skip
OURS = "tq_torch"
#: Times of a job's providers, whose memory peaks are those after its caches were made.
Timed = list[tuple[str, gpu.Timing]]
#: Preset of the small model whose logits are compared.
GATE_PRESET = "k8v8"
GATE_STEPS = 20
#: Largest relative error of its logits: those of bf16 and of the new tokens' formats.
TOLERANCE = 1.5e-2
ROPE_THETA = 500000.0
#: What is measured where nothing is asked for: steps; generations and what fits.
BATCHES = "1,16,64", "1,16"
LENGTHS = "8192,32768,131072", "32768"
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
    def layout(self) -> CacheLayout:
        """That of a packed cache."""
        return CacheLayout(
            QuantConfig.preset(self.preset), self.shape.Hk, self.shape.D, self.page_size
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the tokens in all layers."""
        shape = self.shape
        if not self.preset:
            return self.config.layers * shape.bf16_bytes
        return self.config.layers * shape.B * shape.L * self.layout.bytes_per_token

    @property
    def row(self) -> dict[str, Any]:
        """The columns that say what is timed."""
        return {
            "preset": self.preset, "dtype": "bfloat16", "layers": self.config.layers,
            **self.shape._asdict(), "page_size": self.page_size if self.preset else "",
            "cache_bytes": self.cache_bytes,
        }  # fmt: skip


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

    def __call__(self, ids: Tensor, length: int | Tensor, attend: Attend) -> Tensor:
        """Logits ``[B, vocab]`` of ids ``[B]``, each the last of ``length`` tokens, or ``[B]``."""
        heads, kv_heads, dim = self.config[2:5]
        position = length - 1
        angle = self.inv_freq * (position if isinstance(position, int) else position[:, None, None])
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
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
    return packed_at(torch.full_like(data.lens, length), data, caches)


def packed_at(lens: Tensor, data: gpu.Cache, caches: Sequence[Tensor]) -> Attend:
    """The first ``lens`` ``[B]`` tokens of each sequence; graphs read them when replayed."""
    page_size = data.layout.page_size
    position = lens.long() - 1
    pages = data.table.gather(1, (position // page_size)[:, None])[:, 0]
    slots = pages.long() * page_size + position % page_size
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
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--fit", action="store_true",
        help="one sequence, then the largest batch that fits with a bf16 cache, with the presets "
        "too, then the largest batch of each preset; --batch is without effect",
    )  # fmt: skip
    one.add_argument(
        "--generate", type=positive, metavar="N", default=None,
        help="N steps that feed their tokens back, up to --lengths; a step is a replay of a CUDA "
        "graph, and tq_torch's is one graph, which counts the lengths on the device; tokens must "
        "be those of eager calls",
    )  # fmt: skip
    one.add_argument(
        "--jax", action="store_true",
        help="the model in JAX: tq_jax beside jax.nn.dot_product_attention, whole generations in "
        "a jitted loop with donated caches; the time of a step is that of 2N steps less that of "
        "N, over N",
    )  # fmt: skip
    add("--jax-steps", type=positive, metavar="N", default=16, help="N of --jax")
    add(
        "--batch", default=None, **numbers,
        help=f"sequences, comma-separated; if not given {BATCHES[0]}, with --generate or --jax "
        f"{BATCHES[1]}",
    )  # fmt: skip
    add(
        "--lengths", default=None, **numbers,
        help=f"tokens of each, comma-separated; if not given {LENGTHS[0]}, with --fit, --generate "
        f"or --jax {LENGTHS[1]}",
    )  # fmt: skip
    add(
        "--most-tokens", type=positive, default=2**21,
        help="leaves out larger batches; without effect on --fit",
    )  # fmt: skip
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


def shapes_of(arguments: argparse.Namespace, config: Config) -> list[gpu.Shape]:
    """What is asked for; ``--fit`` starts from one sequence of each length."""
    other = arguments.fit or arguments.jax or arguments.generate is not None
    numbers = gpu.listed(gpu.positive)
    lengths = arguments.lengths or numbers(LENGTHS[other])
    if arguments.fit:
        return [config.shape(1, length) for length in lengths]
    return [
        config.shape(batch, length)
        for batch in arguments.batch or numbers(BATCHES[other])
        for length in lengths
        if batch * length <= arguments.most_tokens
    ]


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    config = LLAMA._replace(layers=arguments.layers)
    shapes = shapes_of(arguments, config)
    if not shapes:
        print(f"no batch has at most {arguments.most_tokens} tokens")
        return 2
    steps = 2 * arguments.jax_steps if arguments.jax else arguments.generate or 0
    if short := [s.L for s in shapes if steps > s.L]:
        print(f"{steps} steps end at a length of at least {steps}, not at {short[0]}")
        return 2
    if arguments.jax:
        from bench import model_jax  # it imports JAX

        return model_jax.run(arguments, config, shapes)
    return run_torch(arguments, config, shapes)


@torch.inference_mode()
def run_torch(arguments: argparse.Namespace, config: Config, shapes: Sequence[gpu.Shape]) -> int:
    """Everything but ``--jax``."""
    from bench import model_fit, model_generate  # they import this module

    page_size = arguments.page_size
    errors = gate(config, page_size)
    print(f"logits of a small model, tq_torch's with {GATE_PRESET}, against SDPA without a kernel")
    for name, error in errors.items():
        print(f"{name}: relative error {error:.2e}, expected at most {TOLERANCE:g}")
    if not errors[OURS] <= TOLERANCE:
        print("nothing was timed or written")
        return 1
    clean()
    peers = {b: name for b, name in SDPA.items() if errors.get(name, 0.0) <= TOLERANCE}
    if arguments.fit:
        return model_fit.run(arguments, config, shapes, peers)
    jobs = [Job(config, s, preset, page_size) for s in shapes for preset in arguments.presets]
    largest = max(s.L * s.Hk * s.D for s in shapes)
    gpu.in_workers(warm, jobs, arguments.jobs, 4 * largest + 2**28)
    what, how = "step", timed_steps
    if arguments.generate is not None:
        what = f"generate {arguments.generate}"
        how = partial(model_generate.timed, steps=arguments.generate)
    made = Model(config)
    environment = gpu.environment(arguments.commit)
    wrong = False
    for shape in shapes:
        skipped: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        for job in [Job(config, shape, "", page_size), *(j for j in jobs if j.shape == shape)]:
            new = measure(made, job, peers, arguments.rounds, skipped, how)
            with_ratios(rows, new)
            fields = {**environment, "what": what}
            gpu.append_csv(arguments.csv, [{**fields, **row} for row in new], COLUMNS)
            rows += new
        show(shape, rows)
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}", flush=True)
        wrong |= model_generate.OTHER_TOKENS in skipped.values()
    return 1 if wrong else 0


def clean() -> None:
    """Gives back to the device what nothing holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def made_caches() -> None:
    """To be called when caches are made: peaks count from here."""
    clean()
    torch.cuda.reset_peak_memory_stats()


def no_room(reason: str) -> bool:
    """Whether an error's text says that memory is short; not only torch's allocator says so."""
    return "out of memory" in reason.lower() or "OutOfMemory" in reason or "ALLOC_FAILED" in reason


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


def packed_caches(job: Job, shared: bool = False) -> tuple[gpu.Cache, list[Tensor]]:
    """What reads them, and caches of all layers; ``shared``: one that all layers use.

    The first is filled with tokens and copied: what filling it takes is given back before there are
    others.
    """
    data = gpu.make_cache(job.shape, job.preset, job.page_size, None, fill=True)
    return data, per_layer(data.cache, job.config.layers, shared)


def dense_caches(job: Job, shared: bool = False) -> list[Tensor]:
    """Contiguous bf16 caches ``[2, B, Hk, L, D]`` likewise."""
    shape = job.shape
    size = (2, shape.B, shape.Hk, shape.L, shape.D)
    first = torch.empty(size, dtype=torch.bfloat16, device=gpu.DEVICE).normal_()
    return per_layer(first, job.config.layers, shared)


def per_layer(first: Tensor, layers: int, shared: bool) -> list[Tensor]:
    """``first`` and copies of it."""
    torch.cuda.empty_cache()
    return [first, *(first if shared else first.clone() for _ in range(1, layers))]


def runs_of(
    model: Model, job: Job, peers: Mapping[SDPBackend, str], shared: bool = False
) -> list[gpu.Run]:
    """Steps over new caches: one, or over bf16 caches one of each peer."""
    shape = job.shape
    if job.preset:
        attends = {OURS: packed(shape.L, *packed_caches(job, shared))}
    else:
        caches = dense_caches(job, shared)
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


def timed_steps(
    model: Model,
    job: Job,
    peers: Mapping[SDPBackend, str],
    rounds: int,
    skipped: dict[str, str],
) -> Timed:
    """Times of the same step again and again."""
    runs = runs_of(model, job, peers)
    made_caches()
    return [(run.provider, timing) for run, timing in gpu.time_runs(runs, rounds, skipped)]


def measure(
    model: Model,
    job: Job,
    peers: Mapping[SDPBackend, str],
    rounds: int,
    skipped: dict[str, str],
    how: Callable[..., Timed] = timed_steps,
) -> list[dict[str, Any]]:
    """Rows of a job's providers; of those that cannot be timed, ``skipped`` gets the reason.

    Where the caches, or any provider with them, do not fit into the memory, the times are empty.
    """
    reasons: dict[str, str] = {}
    try:
        timed = how(model, job, peers, rounds, reasons)
        peak = torch.cuda.max_memory_allocated()
    except RuntimeError as error:
        if not no_room(gpu.reason_of(error)):
            raise
        timed, reasons = [], {"": gpu.reason_of(error)}
    clean()
    if not timed and any(map(no_room, reasons.values())):
        blank = dict.fromkeys(("us_median", "us_spread", "tokens_per_second", "peak_bytes"), "")
        names = [OURS] if job.preset else list(peers.values())
        return [{**job.row, **blank, "provider": name} for name in names]
    skipped |= reasons
    return [
        {
            **job.row, "provider": provider, "us_median": timing.median,
            "us_spread": timing.spread, "tokens_per_second": 1e6 * job.shape.B / timing.median,
            "peak_bytes": peak,
        }
        for provider, timing in timed
    ]  # fmt: skip


def with_ratios(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Adds the speed of ``rows`` in units of the fastest bf16 provider's, there or ``before``."""
    timed = [r for r in (*before, *rows) if r["us_median"] != ""]
    best = min((r["us_median"] for r in timed if not r["preset"]), default=None)
    for row in rows:
        known = best is not None and row["us_median"] != ""
        row["ratio_to_bf16"] = best / row["us_median"] if known else ""


def show(shape: gpu.Shape, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows of one shape."""
    print("\n" + ", ".join(f"{name}={size}" for name, size in shape._asdict().items()))
    lines: list[tuple[str, ...]] = []
    for row in rows:
        name = " ".join(filter(None, (row["provider"], row["preset"] or row["dtype"])))
        gigabytes = f"{row['cache_bytes'] / 1e9:.2f}"
        if row["us_median"] == "":
            lines.append((name, "skipped: out of memory", "", "", gigabytes, "", ""))
            continue
        times = f"{row['us_median']:.0f}", f"{row['us_spread']:.0f}"
        ratio = row["ratio_to_bf16"]
        speed = f"{row['tokens_per_second']:.1f}"
        peak = row["peak_bytes"]
        shown = f"{peak / 1e9:.2f}" if peak != "" else ""
        against = f"{ratio:.2f}" if ratio != "" else ""
        lines.append((name, *times, speed, gigabytes, shown, against))
    print_table(("", "us", "25-75 %", "tokens/s", "cache GB", "peak GB", "x bf16"), lines)
