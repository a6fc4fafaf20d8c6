from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.cases import CONFIGS, HEAD_DIMS, config_id
from tq_core import CacheLayout, QuantConfig, support, why_unsupported
from tq_core.layout import ORDERS
from tq_core.support import BACKENDS, TARGETS, choose_backend

LAYOUT = CacheLayout(QuantConfig(), 8, 128, 16)


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


@pytest.mark.filterwarnings("ignore:tq_torch computes without its kernels:RuntimeWarning")
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


@pytest.fixture
def triton(monkeypatch):
    """Sets which Triton seems to be installed, and whether it seems to interpret."""
    kernels = pytest.importorskip("tq_core.kernels")

    def install(version, interpreted=False):
        def found(name):
            if version is None:
                raise ImportError("a library is missing")
            return SimpleNamespace(__version__=version)

        support._triton_reasons.cache_clear()
        monkeypatch.setattr(support, "find_spec", lambda name: name)
        monkeypatch.setattr(support, "import_module", found)
        monkeypatch.setattr(kernels, "interpreted", lambda: interpreted)

    yield install
    support._triton_reasons.cache_clear()


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0", "4.0.0+git1234"])
@pytest.mark.parametrize("backend, targets", [("triton", ("cuda", "hip")), ("interpret", ("cpu",))])
def test_kernels_serve_on_their_devices(triton, version, backend, targets):
    triton(version, interpreted=backend == "interpret")
    for target in TARGETS:
        reasons = why_unsupported(LAYOUT, backend=backend, target=target)
        assert (reasons == []) == (target in targets)


def test_the_gpu_default_is_triton_and_interpret_is_never_one(triton):
    triton("3.6.0")
    assert choose_backend(LAYOUT, backend=None, target="cuda") == "triton"
    assert choose_backend(LAYOUT, backend=None, target="hip") == "triton"
    triton("3.6.0", interpreted=True)
    assert choose_backend(LAYOUT, backend=None, target="cpu") == "native"
    with pytest.warns(RuntimeWarning, match="without its kernels on this GPU.*TRITON_INTERPRET"):
        assert choose_backend(LAYOUT, backend=None, target="cuda") == "native"


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1+git"])
def test_an_old_triton_is_named(triton, version):
    triton(version)
    reasons = why_unsupported(LAYOUT, backend="triton", target="cuda")
    assert reasons == [f"triton 3.6 or newer is needed, {version} is installed"]
    with pytest.warns(RuntimeWarning, match="many times slower: triton 3.6 or newer is needed"):
        assert choose_backend(LAYOUT, backend=None, target="cuda") == "native"


def test_a_missing_and_a_broken_triton_are_named(triton, monkeypatch):
    triton(None)
    (reason,) = why_unsupported(LAYOUT, backend="triton", target="cuda")
    assert reason == "triton is installed and cannot be imported: a library is missing"
    support._triton_reasons.cache_clear()
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    (reason,) = why_unsupported(LAYOUT, backend="triton", target="cuda")
    assert reason == "the triton package is not installed"


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_interpreter_is_chosen_before_triton_is_imported(triton, interpreted):
    triton("3.6.0", interpreted)
    backend, target = (("interpret", "cpu"), ("triton", "cuda"))[interpreted]
    (reason,) = why_unsupported(LAYOUT, backend=backend, target=target)
    assert "TRITON_INTERPRET=1" in reason


@pytest.mark.parametrize("backend, target", [("triton", "cuda"), ("interpret", "cpu")])
def test_a_head_dim_for_native_alone_names_it(triton, backend, target):
    triton("3.6.0", interpreted=backend == "interpret")
    layout = CacheLayout(QuantConfig(), 8, 100, 16)
    (reason,) = why_unsupported(layout, backend=backend, target=target)
    assert "multiple of 8, not 100" in reason
    assert "backend='native'" in reason
    assert choose_backend(layout, backend=None, target=target) == "native"


def test_reasons_come_together(triton):
    triton("3.5.0")
    layout = CacheLayout(QuantConfig(), 8, 100, 16)
    reasons = why_unsupported(layout, backend="triton", target="cpu", framework="jax")
    for words in ("not on cpu", "multiple of 8", "3.6 or newer"):
        assert sum(words in reason for reason in reasons) == 1


def test_reasons_of_a_call(triton):
    triton("3.6.0")
    call = {"target": "cuda", "kernel_reasons": ("its address is odd",)}
    assert choose_backend(LAYOUT, backend=None, **call) == "native"
    assert choose_backend(LAYOUT, backend="native", **call) == "native"
    with pytest.raises(ValueError, match=r"'triton' cannot serve this call: its address is odd"):
        choose_backend(LAYOUT, backend="triton", **call)


@pytest.mark.parametrize("framework", support.FRAMEWORKS)
def test_a_backend_that_a_framework_lacks_is_named(framework):
    for backend in BACKENDS:
        reasons = why_unsupported(LAYOUT, backend=backend, target="cuda", framework=framework)
        lacks = backend not in support.FRAMEWORKS[framework]
        assert any(f"tq_{framework} has no {backend} backend" in r for r in reasons) == lacks


@pytest.fixture
def packages(triton, monkeypatch):
    """Sets which packages seem to be installed beside a good Triton."""
    triton("3.8.0")

    def install(python=(3, 12), **versions):
        def version(package):
            if package.replace("-", "_") not in versions:
                raise support.metadata.PackageNotFoundError(package)
            return versions[package.replace("-", "_")]

        support._jax_triton_reasons.cache_clear()
        monkeypatch.setattr(support.metadata, "version", version)
        monkeypatch.setattr(support.sys, "version_info", python)

    yield install
    support._jax_triton_reasons.cache_clear()


def jax_reasons(target="cuda"):
    return why_unsupported(LAYOUT, backend="triton", target=target, framework="jax")


@pytest.mark.parametrize(
    "jax, triton_version, jax_triton",
    [
        ("0.8.2", "3.6.0", "0.3.1"),
        ("0.11.2", "3.6.0", "0.3.1"),
        ("0.11.0", "3.7.0", "0.4.1"),
        ("0.11.2.dev20261101", "3.8.0+git12", "0.4.2"),
    ],
)
def test_versions_that_work_together(packages, jax, triton_version, jax_triton):
    packages(jax=jax, triton=triton_version, jax_triton=jax_triton)
    assert jax_reasons() == []
    assert choose_backend(LAYOUT, backend=None, target="cuda", framework="jax") == "triton"


@pytest.mark.parametrize(
    "python, versions, reason",
    [
        (
            (3, 12),
            {"jax": "0.11.2", "triton": "3.8.0"},
            "the jax-triton package is not installed; pip install 'jax-triton>=0.4.1,<0.5'",
        ),
        (
            (3, 11),
            {"jax": "0.10.2", "triton": "3.8.0"},
            "the jax-triton package is not installed; pip install 'jax-triton==0.3.1'",
        ),
        (
            (3, 12),
            {"jax": "0.12.0.1", "triton": "3.8.0", "jax_triton": "0.4.1"},
            "jax-triton 0.4.1 needs jax>=0.11,<0.12, 0.12.0 is installed",
        ),
        (
            (3, 12),
            {"jax": "0.11.0", "triton": "3.6.0", "jax_triton": "0.4.1"},
            "jax-triton 0.4.1 needs triton>=3.7, 3.6.0 is installed",
        ),
        (
            (3, 11),
            {"jax": "0.8.0", "triton": "3.6.0", "jax_triton": "0.3.1"},
            "jax-triton 0.3.1 needs jax>=0.8.2,<0.12, 0.8.0 is installed",
        ),
        (
            (3, 12),
            {"jax": "0.11.2", "triton": "3.8.0", "jax_triton": "0.2.0"},
            "jax-triton 0.2.0 is not one that tq works with; pip install 'jax-triton>=0.4.1,<0.5'",
        ),
        (
            (3, 12),
            {"jax": "0.11.2", "triton": "3.8.0", "jax_triton": "0.5.0"},
            "jax-triton 0.5.0 is not one that tq works with; pip install 'jax-triton>=0.4.1,<0.5'",
        ),
    ],
)
def test_what_to_install_is_named(packages, python, versions, reason):
    packages(python, **versions)
    assert jax_reasons() == [reason]
    assert why_unsupported(LAYOUT, backend="triton", target="cuda") == []
    with pytest.raises(ValueError, match="'triton' cannot serve"):
        choose_backend(LAYOUT, backend="triton", target="cuda", framework="jax")
    with pytest.warns(RuntimeWarning, match="tq_jax computes without its kernels on this GPU"):
        assert choose_backend(LAYOUT, backend=None, target="cuda", framework="jax") == "native"


def test_a_jax_without_gpus_is_named(packages, monkeypatch):
    packages(jax="0.11.2", triton="3.8.0", jax_triton="0.4.1")
    monkeypatch.setattr(support, "find_spec", lambda name: None if "plugin" in name else name)
    on_cpu, needs = jax_reasons("cpu")
    assert "not on cpu" in on_cpu
    assert needs == "JAX has no GPU support here; pip install 'jax[cuda13]' brings it"


def test_unknown_frameworks_are_refused():
    with pytest.raises(ValueError, match=r"framework: expected one of \['torch', 'jax'\]"):
        why_unsupported(LAYOUT, backend="native", target="cpu", framework="numpy")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": 3, "target": "cuda"}, "layout: expected a CacheLayout, got int"),
        ({"layout": LAYOUT, "target": None}, "target: expected the name of a device kind"),
    ],
)
def test_wrong_types_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        why_unsupported(**arguments, backend="native")


@pytest.mark.parametrize("target", ["gpu", "rocm", "CUDA", "sm_90", ""])
def test_unknown_targets_are_refused(target):
    message = rf"target: expected one of \['cpu', 'cuda', 'hip'.* ROCm, got '{target}'"
    for backend in ("native", "triton"):
        with pytest.raises(ValueError, match=message):
            why_unsupported(LAYOUT, backend=backend, target=target)


def test_native_serves_devices_of_kinds_that_nobody_listed():
    assert choose_backend(LAYOUT, backend=None, target="hpu") == "native"
    assert choose_backend(LAYOUT, backend="native", target="hpu") == "native"
    with pytest.raises(ValueError, match="triton runs on cuda and hip devices, not on hpu"):
        choose_backend(LAYOUT, backend="triton", target="hpu")


def test_a_device_index_is_no_other_target():
    for target in ("cuda", "hip", "cpu"):
        want = why_unsupported(LAYOUT, backend="triton", target=target)
        assert why_unsupported(LAYOUT, backend="triton", target=f"{target}:1") == want
