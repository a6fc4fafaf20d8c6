from __future__ import annotations

import pytest

from tests.cases import CONFIGS, HEAD_DIMS, config_id
from tq_core import CacheLayout, QuantConfig, why_unsupported
from tq_core.layout import ORDERS
from tq_core.support import BACKENDS, choose_backend

LAYOUT = CacheLayout(QuantConfig(), 8, 128, 16)
TARGETS = ("cpu", "cuda", "hip", "mps", "tpu")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_native_serves_every_layout_everywhere(config, target):
    for i, head_dim in enumerate(HEAD_DIMS):
        layout = CacheLayout(config, 1 + i % 3, head_dim, (1, 3, 16, 64)[i % 4], ORDERS[i % 3])
        assert why_unsupported(layout, backend="native", target=target) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_named_backend_serves_or_raises_with_all_the_reasons(backend, target):
    reasons = why_unsupported(LAYOUT, backend=backend, target=target)
    assert all(isinstance(r, str) and r for r in reasons)
    assert len(set(reasons)) == len(reasons)
    if not reasons:
        assert choose_backend(LAYOUT, backend=backend, target=target) == backend
        return
    with pytest.raises(ValueError, match=f"^backend: '{backend}' cannot serve") as caught:
        choose_backend(LAYOUT, backend=backend, target=target)
    for reason in reasons:
        assert reason in str(caught.value)


def test_triton_on_a_cpu_names_the_device():
    reasons = why_unsupported(LAYOUT, backend="triton", target="cpu")
    assert any("cuda and hip" in r and "cpu" in r for r in reasons)


@pytest.mark.parametrize("target", TARGETS)
def test_no_name_takes_one_that_can_serve(target):
    backend = choose_backend(LAYOUT, backend=None, target=target)
    assert why_unsupported(LAYOUT, backend=backend, target=target) == []


def test_the_cpu_default_is_native():
    assert choose_backend(LAYOUT, backend=None, target="cpu") == "native"


@pytest.mark.parametrize("call", [why_unsupported, choose_backend])
def test_unknown_backends_are_refused(call):
    with pytest.raises(ValueError, match=r"backend: expected one of \['triton'.*got 'cutlass'"):
        call(LAYOUT, backend="cutlass", target="cpu")
