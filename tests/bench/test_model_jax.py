"""The model in JAX of ``bench model``, with the CPU in place of the GPU."""

from __future__ import annotations

import csv
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import bench.__main__ as command_line
from bench import gpu, model, model_jax
from tests.bench.test_model import TINY

WORDS = ("--presets", "4bit", "--batch", "1,3", "--lengths", "37", "--page-size", "16")
SHAPE = TINY.shape(3, 37)
KINDS = {
    "bf16": lambda: model_jax.Dense(SHAPE, model_jax.XLA),
    "packed": lambda: model_jax.packed(SHAPE, "k8v8", 16),
}


@pytest.fixture
def on_cpu(on_cpu, monkeypatch):
    monkeypatch.setattr(model, "LLAMA", TINY)
    return on_cpu


def run(path, *words):
    parser = command_line.argparse.ArgumentParser()
    model.add_arguments(parser)
    words = (*WORDS, "--jax", "--jax-steps", "3", "--rounds", "2", "--csv", str(path), *words)
    return model.run(parser.parse_args(words))


def to_jax(tensor):
    return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)


@torch.inference_mode()
def test_the_model_is_that_in_torch(on_cpu):
    made = model.Model(TINY)
    params = {
        "embedding": to_jax(made.embedding), "head": to_jax(made.head), "norm": to_jax(made.norm),
        "layers": [{n: to_jax(w) for n, w in x._asdict().items()} for x in made.layers],
    }  # fmt: skip
    like = jax.tree.map(jnp.shape, model_jax.make_params(TINY))
    assert jax.tree.map(jnp.shape, params) == like
    ids = model.make_ids(made, 9, 3)
    caches = list(torch.full((2, 2, 3, TINY.kv_heads, 9, TINY.head_dim), math.nan).bfloat16())
    shape = TINY.shape(3, 9)
    kind = model_jax.Dense(shape, model_jax.XLA)
    jax_caches = [kind.empty(jnp.zeros) for _ in range(TINY.layers)]
    for n, row in enumerate(ids):
        want = made(row, n + 1, model.dense(n + 1, caches, SDPBackend.MATH))
        lens = jnp.full(3, n + 1, jnp.int32)
        have, jax_caches = model_jax.forward(
            params, TINY, jnp.asarray(row.numpy()), lens, jax_caches, kind.attend(lens)
        )
        have = torch.from_numpy(np.array(have, np.float32))
        assert gpu.relative_error(have, want) < 2e-2


def test_gate(on_cpu):
    errors = model_jax.gate(TINY, 64)
    assert errors["tq_jax"] <= model.TOLERANCE
    for peer in (model_jax.CUDNN, model_jax.WHOLE):
        assert isinstance(errors[peer.name], str)


def test_gate_of_peers(on_cpu, monkeypatch):
    """XLA in place of cuDNN; what has no lengths is right where the cache is full."""
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention",
        lambda *args, implementation, **what: attend(*args, implementation="xla", **what),
    )  # fmt: skip
    errors = model_jax.gate(TINY, 16)
    assert errors[model_jax.CUDNN.name] == 0
    assert errors[model_jax.WHOLE.name] < 2e-3


def test_caches_are_filled(on_cpu):
    dense = model_jax.Dense(SHAPE, model_jax.XLA)
    for x in dense.fill():
        assert (x.shape, x.dtype) == ((3, 37, 2, 32), jnp.bfloat16)
        assert float(x.astype(jnp.float32).std()) == pytest.approx(1, abs=0.05)
    packed = model_jax.packed(SHAPE, "4bit", 16)
    cache = packed.fill()
    assert cache.shape == packed.layout.shape(9)
    assert bool((cache != 0).any(axis=(2, 3)).all())
    assert sorted(packed.table().flatten().tolist()) == list(range(9))


def test_caches_are_filled_in_parts(on_cpu, monkeypatch):
    monkeypatch.setattr(model_jax, "STORED", 64)
    cache = model_jax.packed(SHAPE, "4bit", 16).fill()
    assert bool((cache != 0).any(axis=(2, 3)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_its_steps(kind, on_cpu):
    kind = KINDS[kind]()
    params = model_jax.make_params(TINY)
    program = model_jax.compiled(params, TINY, kind)
    ids, lens = jnp.arange(3, dtype=jnp.int32), jnp.full(3, 30, jnp.int32)
    caches = [kind.fill() for _ in range(TINY.layers)]
    step_ids, step_lens, step_caches = ids, lens, jax.tree.map(jnp.copy, caches)
    for _ in range(5):
        step_ids, step_caches = program(params, step_caches, step_ids, step_lens, jnp.int32(1))
        step_lens = step_lens + 1
    new_ids, new_caches = program(params, caches, ids, lens, jnp.int32(5))
    assert new_ids.tolist() == step_ids.tolist()
    for x, y in zip(jax.tree.leaves(new_caches), jax.tree.leaves(step_caches), strict=True):
        assert bool((x == y).all())
    assert all(x.is_deleted() for x in jax.tree.leaves(caches))


def test_peak(monkeypatch):
    class Sizes:
        temp_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 100, 30, 20

    class Program:
        memory_analysis = Sizes

    class Device:
        stats = None

        def memory_stats(self):
            return self.stats

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert model_jax.peak_bytes(Program) == ""
    monkeypatch.setattr(Device, "stats", {"bytes_in_use": 1000})
    assert model_jax.peak_bytes(Program) == 1110


def test_rows(on_cpu, tmp_path, capsys, monkeypatch):
    errors = {"tq_jax": 1e-3, "jax cudnn": "no cuDNN", "jax cudnn, all slots": 1.0}
    monkeypatch.setattr(model_jax, "gate", lambda *args: errors)
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == model.COLUMNS
    assert [(r["B"], r["provider"], r["preset"], r["what"]) for r in rows] == [
        (batch, *rest, "generate 3")
        for batch in ("1", "3")
        for rest in (("jax xla", ""), ("tq_jax", "4bit"))
    ]
    assert all(r["us_median"] for r in rows)
    output = capsys.readouterr().out
    assert "jax cudnn: does not run, no cuDNN" in output
    assert "compiled in" in output


def test_failed_gate_times_and_writes_nothing(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_jax, "gate", lambda *args: {"tq_jax": math.nan})
    path = tmp_path / "rows.csv"
    assert run(path) == 1
    assert not path.exists()
    assert "nothing was timed or written" in capsys.readouterr().out


def test_gate_sees_wrong_attention(on_cpu, monkeypatch):
    attend = model_jax.tq_jax.decode_attention
    monkeypatch.setattr(
        model_jax.tq_jax, "decode_attention", lambda *a, **what: attend(*a, **what) * 1.1
    )
    assert model_jax.gate(TINY, 16)["tq_jax"] > model.TOLERANCE


@pytest.mark.parametrize("reason, rows", [("RESOURCE_EXHAUSTED: Out of memory", 1), ("other", 0)])
def test_what_cannot_be_timed(reason, rows, on_cpu, monkeypatch, capsys):
    def fails(*args):
        raise ValueError(reason)

    monkeypatch.setattr(model_jax, "timed", fails)
    job = model.Job(TINY, SHAPE, "4bit", 16)
    found = model_jax.measure(None, job, None, "tq_jax", 3, 2)
    assert [r["us_median"] for r in found] == [""] * rows
    assert f"not timed, ValueError: {reason}" in capsys.readouterr().out
