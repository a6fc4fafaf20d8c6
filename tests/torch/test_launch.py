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
    assert launch._constants(first, CPU) is launch._constants(second, CPU)
    assert launch._constants(codec(502), CPU) is not launch._constants(first, CPU)


def test_buffers_live_as_long_as_an_equal_codec():
    first, second = codec(503), codec(503)
    key = (first.digest, CPU)
    buffers = launch._constants(first, CPU)
    del first
    gc.collect()
    launch._constants(codec(504), CPU)
    assert launch._CODECS[key] is buffers
    del second
    gc.collect()
    launch._constants(codec(505), CPU)
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
        found = list(pool.map(lambda _: launch._constants(mine, CPU), range(32)))
    assert len(made) == 1
    assert all(buffers is found[0] for buffers in found)


def test_buffers_made_in_inference_mode_are_ordinary_tensors():
    mine = codec(507)
    with torch.inference_mode():
        buffers = launch._constants(mine, CPU)
    assert not buffers.tensors["query_matrix"].is_inference()


def test_a_capture_with_an_unknown_codec_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^codec: .* make one call with this codec before"):
        launch._constants(codec(508), torch.device("cuda", 0))


@pytest.mark.parametrize("offset, align", [(0, 16), (1, 1), (2, 2), (4, 4), (8, 8), (12, 4)])
def test_align(offset, align):
    memory = torch.empty(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert launch.align(memory[start + offset :]) == align


class Compiler:
    """In place of a Triton kernel: notes what is looked up and what is launched."""

    arg_names = ("a_ptr", "count", "constant_ptr", "out_ptr", "rest_ptr", "FIRST", "SECOND")

    def __init__(self):
        self.compiles = True
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
            return lambda *arguments, stream: self.owner.launched.append((grid, arguments, stream))


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(launch.kernels, "load", lambda: SimpleNamespace(store=made))
    monkeypatch.setattr(launch.kernels, "current_stream", lambda _: 99)
    return made


CONSTANT = torch.zeros(1)
CONSTANTS = launch._Constants({"constant": CONSTANT}, {"constant": CONSTANT.data_ptr()})


def a_launch(**changes):
    outputs = (dispatch.Buffer("out", (3,), "float32"), dispatch.Buffer("rest", (2, 5), "int8"))
    made = dispatch.Launch(
        "store", 5, ("a", "constant"), (7,), outputs, (("SECOND", "two"), ("FIRST", 1)), 4, 2
    )
    return replace(made, **changes)


def run(prepared, **arrays):
    launch._run(prepared, CONSTANTS, arrays, CPU)
    return arrays


def test_a_kernel_is_looked_up_once_for_each_alignment(compiler):
    memory = torch.empty(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    aligned, shifted = memory[start : start + 8], memory[start + 1 : start + 9]
    prepared = launch._prepared((a_launch(),), given=("out",), results=())
    out = torch.zeros(3)
    for a in (aligned, aligned, shifted, shifted, aligned):
        run(prepared, a=a, out=out)
    options = {"FIRST": 1, "SECOND": "two", "num_warps": 4, "num_stages": 2}
    assert [(grid, given[2], kept) for grid, given, kept in compiler.found] == [
        ((5, 1, 1), 7, {**options, "enable_fp_fusion": True})
    ] * 2
    assert [given[0] is aligned for _, given, _ in compiler.found] == [True, False]
    assert all(given[1] is CONSTANT and given[3] is out for _, given, _ in compiler.found)
    # Then addresses are enough; constants follow in the order of the kernel's parameters.
    assert [(grid, given[2], given[5:], stream) for grid, given, stream in compiler.launched] == [
        ((5, 1, 1), 7, (1, "two"), 99)
    ] * 3
    places = [x.data_ptr() for x in (aligned, shifted, aligned)]
    assert [given[0] for _, given, _ in compiler.launched] == places
    known = {(given[1], given[3]) for _, given, _ in compiler.launched}
    assert known == {(CONSTANT.data_ptr(), out.data_ptr())}


def test_scratch_is_one_array(compiler):
    steps = (a_launch(), a_launch(inputs=("rest", "constant"), outputs=a_launch().outputs[:1]))
    prepared = launch._prepared(steps, given=(), results=())
    for _ in range(2):
        run(prepared, a=torch.zeros(3))
    (_, first, _), (_, second, _) = compiler.found
    assert first[4] is second[0]
    assert (first[3].shape, first[3].dtype) == ((3,), torch.float32)
    assert (first[4].shape, first[4].dtype) == ((2, 5), torch.int8)
    assert first[4].data_ptr() - first[3].data_ptr() == launch._ALIGN
    (_, first, _), (_, second, _) = compiler.launched
    assert first[4] == second[0] == first[3] + launch._ALIGN


def test_results_are_arrays_of_their_own(compiler):
    prepared = launch._prepared((a_launch(pdl=True),), given=(), results=("out",))
    assert [name for name, *_ in prepared.scratch] == ["rest"]
    arrays = run(prepared, a=torch.zeros(3))
    ((_, given, options),) = compiler.found
    assert options["launch_pdl"] is True
    assert arrays["out"].shape == (3,)
    assert given[3] is arrays["out"]


def test_what_is_interpreted_is_asked_each_time(compiler):
    compiler.compiles = False
    prepared = launch._prepared((a_launch(),), given=(), results=())
    for _ in range(2):
        run(prepared, a=torch.zeros(3))
    assert len(compiler.found) == 2
    assert compiler.launched == []


def test_no_programs_no_kernel(compiler):
    prepared = launch._prepared((a_launch(grid=0),), given=(), results=("out",))
    arrays = run(prepared, a=torch.zeros(3))
    assert compiler.found == []
    assert arrays["out"].shape == (3,)
