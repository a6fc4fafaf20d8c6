"""The launcher's buffers: what they are read from, how long they live."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tq_core import Codec, QuantConfig
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
