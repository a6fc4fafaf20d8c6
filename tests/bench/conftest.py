"""The CPU in place of the GPU, for runs of whole benchmarks."""

from __future__ import annotations

import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from bench import gpu


class Recorded:
    """In place of a CUDA graph: calls what was captured."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs benchmarks on the native backend; yields what was captured, in order."""
    captured = []

    def capture(run):
        for call in run.calls:
            call()
        captured.append(run)
        return gpu.Graph(Recorded(run.calls), len(run.calls))

    ticks = count(1)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1e-3 * next(ticks)
    )
    properties = SimpleNamespace(L2_cache_size=2**15)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "BACKEND", "native")
    monkeypatch.setattr(gpu, "capture", capture)
    monkeypatch.setattr(gpu, "in_workers", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12345)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a processor")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return captured
