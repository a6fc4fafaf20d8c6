"""The launcher: its buffers and how long they live, and what it looks up only once."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tq_core import Codec, QuantConfig, dispatch
from tq_torch import launch

CPU = torch.device("cpu")
CONFIG = QuantConfig.preset("4bit_hq")


def codec(seed):
    return Codec(CONFIG, 16, seed=seed)


def test_equal_codecs_share_their_buffers():
    first, second = codec(501), codec(501)
    assert launch._codec_tensors(first, CPU) is launch._codec_tensors(second, CPU)
    assert launch._codec_tensors(codec(502), CPU) is not launch._codec_tensors(first, CPU)


def test_buffers_live_as_long_as_an_equal_codec():
    first, second = codec(503), codec(503)
    key = (first.digest, CPU)
    buffers = launch._codec_tensors(first, CPU)
    del first
    gc.collect()
    launch._codec_tensors(codec(504), CPU)
    assert launch._CODECS[key] is buffers
    del second
    gc.collect()
    launch._codec_tensors(codec(505), CPU)
    assert key not in launch._CODECS


def test_buffers_are_made_once_by_many_threads(monkeypatch):
    made = []
    original = launch.dispatch.codec_arrays

    def make(codec):
        made.append(codec)
        return original(codec)

    monkeypatch.setattr(launch.dispatch, "codec_arrays", make)
    mine = codec(506)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: launch._codec_tensors(mine, CPU), range(32)))
    assert len(made) == 1
    assert all(buffers is found[0] for buffers in found)


def test_buffers_made_in_inference_mode_are_ordinary_tensors():
    mine = codec(507)
    with torch.inference_mode():
        buffers = launch._codec_tensors(mine, CPU)
    assert not buffers["query_matrix"].is_inference()


def test_a_capture_with_an_unknown_codec_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^codec: .* make one call with this codec before"):
        launch._codec_tensors(codec(508), torch.device("cuda", 0))


@pytest.mark.parametrize("offset, align", [(0, 16), (1, 1), (2, 2), (4, 4), (8, 8), (12, 4)])
def test_align(offset, align):
    memory = torch.empty(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert launch.align(memory[start + offset :]) == align


class Compiler:
    """In place of a Triton kernel: notes what is looked up and what is launched."""

    arg_names = ("a_ptr", "count", "out_ptr", "FIRST", "SECOND")

    def __init__(self, compiles=True):
        self.compiles = compiles
        self.found, self.launched = [], []

    def __getitem__(self, grid):
        def find(*arguments, **options):
            self.found.append((grid, arguments, options))
            return self.Compiled(self) if self.compiles else None

        return find

    class Compiled:
        def __init__(self, owner):
            self.owner = owner

        def __getitem__(self, grid):
            return lambda *arguments: self.owner.launched.append((grid, arguments))


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(launch.kernels, "load", lambda: SimpleNamespace(store=made))
    return made


def a_launch(**changes):
    made = dispatch.Launch(
        "store", 5, ("a",), (7,), (dispatch.Buffer("out", (3,), "float32"),),
        (("SECOND", "two"), ("FIRST", 1)), 4, 2,
    )  # fmt: skip
    return replace(made, **changes)


def test_a_kernel_is_looked_up_once_for_each_alignment(compiler):
    memory = torch.empty(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    aligned, shifted = memory[start : start + 8], memory[start + 1 : start + 9]
    steps = (launch._step(a_launch()),)
    for a in (aligned, aligned, shifted, shifted, aligned):
        arrays = {"a": a, "out": aligned}
        launch._run(steps, arrays, CPU)
    options = {"FIRST": 1, "SECOND": "two", "num_warps": 4, "num_stages": 2}
    assert [(grid, given[1], kept) for grid, given, kept in compiler.found] == [
        ((5, 1, 1), 7, {**options, "enable_fp_fusion": True})
    ] * 2
    assert [given[0] is aligned for _, given, _ in compiler.found] == [True, False]
    # Constants follow in the order of the kernel's parameters.
    assert [(grid, given[1], given[3:]) for grid, given in compiler.launched] == [
        ((5, 1, 1), 7, (1, "two"))
    ] * 3
    assert [given[0] is aligned for _, given in compiler.launched] == [True, False, True]


def test_outputs_are_allocated_and_kept(compiler):
    arrays = {"a": torch.zeros(3)}
    launch._run((launch._step(a_launch(pdl=True)),), arrays, CPU)
    ((_, given, options),) = compiler.found
    assert options["launch_pdl"] is True
    assert arrays["out"].shape == (3,)
    assert given[2] is arrays["out"]


def test_what_is_interpreted_is_asked_each_time(compiler):
    compiler.compiles = False
    steps = (launch._step(a_launch()),)
    for _ in range(2):
        launch._run(steps, {"a": torch.zeros(3)}, CPU)
    assert len(compiler.found) == 2
    assert compiler.launched == []


def test_no_programs_no_kernel(compiler):
    arrays = {"a": torch.zeros(3)}
    launch._run((launch._step(a_launch(grid=0)),), arrays, CPU)
    assert compiler.found == []
    assert arrays["out"].shape == (3,)
