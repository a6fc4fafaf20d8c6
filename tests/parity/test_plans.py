"""Both launchers ask for the same plans, on every kind of device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.cases import make_attention_inputs, make_store_inputs
from tests.kernels.plans import DEVICES
from tests.parity.calls import ATTENTION, STORE
from tq_core.validation import ArraySpec, check_attention
from tq_jax import launch as jax_launch
from tq_torch import launch as torch_launch


@pytest.fixture
def devices(monkeypatch):
    """Gives the devices one by one; both frameworks seem to have it then."""

    def each():
        for found in DEVICES.values():
            monkeypatch.setattr(torch_launch, "device_of", lambda device, found=found: found)
            yield found

    return each


def spec(array, dtype):
    strides = tuple(s // array.itemsize for s in array.strides)
    return ArraySpec(array.shape, dtype, strides)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case, devices):
    arrays = make_attention_inputs(case)
    specs = {
        name: None if x is None else spec(x, case.dtype if name == "query" else x.dtype.name)
        for name, x in arrays.items()
    }
    for decode in (False, True) if case.is_decode else (False,):
        if decode:
            specs["query_start_loc"] = arrays["query_start_loc"] = None
        call = check_attention(**specs, **case.options)
        given = {name: x for name, x in arrays.items() if x is not None}
        what = (case.layout, case.codec)
        for device in devices():
            for plan in (None, {"deterministic": "batch"}):
                ours = torch_launch.attention_plan(
                    call, {**specs, "out": specs["query"]}, *what, None, cache_align=16,
                    overrides=plan,
                )  # fmt: skip
                assert ours == jax_launch.attention_plan(given, device, call, *what, plan)


@pytest.mark.parametrize("case", STORE, ids=str)
def test_store_and_dequantize(case, devices, monkeypatch):
    monkeypatch.setattr(torch_launch, "_prepared", lambda launches, **_: launches)
    inputs = make_store_inputs(case)
    key, value = (spec(x, case.dtype) for x in (inputs.key, inputs.value))
    cache, slots = spec(inputs.cache, "uint8"), spec(inputs.slot_mapping, "int64")
    what = (case.layout, case.codec)
    table = np.zeros((3, 5), np.int32)
    for device in devices():
        ours = torch_launch.prepare_store(key, value, cache, slots, *what, None, cache_align=16)
        assert ours == (jax_launch.store_plan(inputs.key, inputs.cache, device, *what),)
        ours = torch_launch.prepare_dequantize(
            cache, spec(table, "int32"), *what, None, dtype=case.dtype, cache_align=16
        )
        assert ours == (jax_launch.dequantize_plan(table, device, *what, case.dtype),)


def test_jax_devices_are_described_as_torch_describes_them():
    class Client:
        platform_version = "cuda 13000"

    class Gpu:
        platform = "gpu"
        client = Client()
        compute_capability = "9.0"
        core_count = 132
        shared_memory_per_block_optin = 232448
        device_kind = "NVIDIA H200"

    assert jax_launch.device_of(Gpu()) == DEVICES["sm_90"]
    assert jax_launch.device_of(jax.devices("cpu")[0]).kind == "interpret"
