"""``TurboQuantCache`` alone: formats, growth, batches, and what it refuses."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tq_torch.hf.cache
from tests.hf.models import (
    CACHE,
    SIZES,
    forward,
    generate,
    make_cache,
    make_model,
    make_tokens,
    relative_error,
)
from tests.isolation import run_without
from tq_core import Codec, QuantConfig
from tq_torch.hf import TurboQuantCache, padding_mask, turboquant_attention


class Causal(torch.nn.Module):
    """Stands for a model's attention module."""

    is_causal = True


def make_states(batch: int = 2, rows: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, rows, 16, generator=generator).unbind()


def make_small(**options: Any) -> TurboQuantCache:
    return TurboQuantCache(transformers.LlamaConfig(**SIZES), page_size=4, **options)


def append(cache: TurboQuantCache, key: Tensor, value: Tensor, mask: Tensor | None = None) -> None:
    for i, layer in enumerate(cache.layers):
        cache.update(key, value, i)
        layer.append(mask)


def contents(cache: TurboQuantCache, lens: list[int]) -> list[Tensor]:
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    pairs = [layer.dequantize(seq_lens, torch.float32) for layer in cache.layers]
    return [torch.cat(pair, -1)[:, : max(lens)] for pair in pairs]


@pytest.fixture
def llama() -> transformers.PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def cache() -> TurboQuantCache:
    return make_small()


def test_presets_of_layers(llama: Any) -> None:
    wide, narrow = QuantConfig.preset("k8v8"), QuantConfig.preset("2bit")
    codec = Codec(narrow, 16, seed=3)
    for preset in (["k8v8", codec], {0: wide, "default": codec}, {0: "k8v8", 1: codec}):
        cache = make_cache(llama, preset)
        generate(llama, make_tokens(), cache)
        assert cache.layers[0].layout.config == wide
        assert cache.layers[1].codec is codec
        assert cache.layers[0].nbytes > 2 * cache.layers[1].nbytes


def test_a_seed_changes_the_bytes() -> None:
    caches = [make_small(seed=seed) for seed in (0, 0, 1)]
    for cache in caches:
        append(cache, *make_states())
    first, same, other = (contents(cache, [5, 5])[0] for cache in caches)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_growth_is_geometric_and_keeps_tokens(cache: TurboQuantCache) -> None:
    key, value = make_states(rows=61)
    capacities: set[int] = set()
    for i in range(61):
        append(cache, key[:, :, i : i + 1], value[:, :, i : i + 1])
        capacities.add(cache.layers[0].capacity)
    assert len(capacities) <= 9
    assert cache.layers[0].capacity <= 24
    whole = make_small()
    append(whole, key, value)
    assert torch.equal(contents(cache, [61, 61])[1], contents(whole, [61, 61])[1])


def test_num_tokens_reserves() -> None:
    cache = make_small(num_tokens=30)
    append(cache, *make_states())
    pages = cache.layers[0].pages
    append(cache, *make_states(rows=25))
    assert cache.layers[0].pages is pages
    assert cache.layers[0].capacity == 8


def test_padding_is_not_stored(cache: TurboQuantCache) -> None:
    key, value = make_states()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1]]).bool()
    append(cache, key, value, mask)
    reference = make_small()
    packed = [torch.stack([x[b][:, mask[b]] for b in range(2)]) for x in (key, value)]
    append(reference, *packed)
    assert cache.get_seq_length() == 5
    assert torch.equal(contents(cache, [3, 3])[0], contents(reference, [3, 3])[0])


def test_reordered_sequences_share_no_pages(cache: TurboQuantCache) -> None:
    append(cache, *make_states(batch=3))
    before = contents(cache, [5] * 3)[1]
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(contents(cache, [5] * 3)[1], before[[2, 2, 0]])
    append(cache, *make_states(batch=3, rows=2, seed=1))
    after = contents(cache, [7] * 3)[1]
    assert torch.equal(after[:, :5], before[[2, 2, 0]])
    assert not torch.equal(after[0, 5:], after[1, 5:])


def test_batch_changes(cache: TurboQuantCache) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    append(cache, *make_states(), mask)
    before = contents(cache, [3, 5])[0]
    cache.batch_repeat_interleave(2)
    assert torch.equal(contents(cache, [3, 3, 5, 5])[0], before[[0, 0, 1, 1]])
    mask = torch.nn.functional.pad(mask.repeat_interleave(2, 0), (0, 2), value=True)
    append(cache, *make_states(batch=4, rows=2, seed=1), mask)
    assert torch.equal(contents(cache, [3, 3, 5, 5])[0], before[[0, 0, 1, 1]])
    after = contents(cache, [5, 5, 7, 7])[0]
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    assert torch.equal(contents(cache, [5, 7])[0], after[1:3])
    mask = torch.nn.functional.pad(mask[1:3], (0, 1), value=True)
    append(cache, *make_states(rows=1, seed=2), mask)
    assert torch.equal(contents(cache, [5, 7])[0], after[1:3])


def test_crop_forgets_the_last_columns(llama: Any, cache: TurboQuantCache) -> None:
    tokens, mask = make_tokens(batch=2), torch.ones(2, 21)
    mask[0, :3] = 0
    forward(llama, tokens[:, :15], cache, mask[:, :15])
    cache.crop(-6)
    cache.crop(0)
    assert cache.get_seq_length() == 9
    actual = forward(llama, tokens[:, 9:], cache, mask)
    whole = forward(llama, tokens, make_cache(llama), mask)[:, 9:]
    assert relative_error(actual, whole) < 1e-5
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(3)


def test_reset_takes_another_batch(llama: Any, cache: TurboQuantCache) -> None:
    first = forward(llama, make_tokens(batch=2), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    forward(llama, make_tokens(batch=1), cache)
    cache.reset()
    assert torch.equal(forward(llama, make_tokens(batch=2), cache), first)


def test_a_copy_is_independent(llama: Any, cache: TurboQuantCache) -> None:
    prompt, mask = make_tokens(batch=2), torch.ones(2, 27)
    mask[0, :3] = 0
    forward(llama, prompt, cache, mask[:, :21])
    first, second = make_tokens(2, 6, seed=1), make_tokens(2, 6, seed=2)
    other = copy.deepcopy(cache)
    expected = forward(llama, first, cache, mask)
    forward(llama, second, copy.deepcopy(other), mask)
    assert torch.equal(forward(llama, first, other, mask), expected)


def test_flags(cache: TurboQuantCache) -> None:
    gemma = make_cache(make_model("gemma2"))
    assert gemma.is_sliding == [True, False]
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.get_max_length() == -1
    assert cache.nbytes == 0
    append(cache, *make_states())
    assert cache.nbytes == 2 * cache.layers[0].pages.numel()
    assert cache.get_mask_sizes(3, 1) == (8, 0)


@pytest.mark.parametrize(
    "preset, error, match",
    [
        ("5bit", ValueError, "5bit"),
        (["4bit"], ValueError, "each of 2 layers"),
        ({0: "4bit"}, ValueError, r"layers \[1\]"),
        ({2: "4bit", "default": "4bit"}, ValueError, r"\[2\]"),
        (4, TypeError, "int"),
        ([4, 4], TypeError, "int"),
    ],
)
def test_wrong_presets(llama: Any, preset: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_cache(llama, preset)


@pytest.mark.parametrize(
    "config, match",
    [
        (transformers.T5Config(), "cross-attention"),
        (
            transformers.Qwen3NextConfig(num_hidden_layers=4),
            "linear_attention are not supported",
        ),
        (transformers.Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
        (transformers.Gemma3nTextConfig(), "share"),
    ],
    ids=["encoder_decoder", "linear", "chunked", "shared"],
)
def test_models_that_are_refused(config: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TurboQuantCache(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_refused(attention: str) -> None:
    model = make_model("llama", attention)
    with pytest.raises(RuntimeError, match="turboquant"):
        forward(model, make_tokens(), make_cache(model))


def test_another_cache_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="TurboQuantCache"):
        forward(llama, make_tokens(), transformers.DynamicCache(config=llama.config))
    with pytest.raises(ValueError, match="TurboQuantCache"), torch.no_grad():
        llama(make_tokens(), use_cache=False)


def test_gradients_are_refused(llama: Any, cache: TurboQuantCache) -> None:
    with pytest.raises(ValueError, match="inference"):
        llama(make_tokens(), **{CACHE: cache})


def test_four_dimensional_masks_are_refused(llama: Any, cache: TurboQuantCache) -> None:
    mask = torch.zeros(1, 1, 21, 21)
    with pytest.raises(ValueError, match="4 dimensions"):
        forward(llama, make_tokens(), cache, mask)


def test_masks_that_are_not_causal_are_refused() -> None:
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 6, "q_offset": 2}

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - 3)

    def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < 5)

    assert padding_mask(**sizes, mask_function=causal) is None
    assert padding_mask(**sizes, mask_function=window, local_size=3) is None
    for options in (
        {"mask_function": prefix},
        {"mask_function": window},
        {"mask_function": window, "local_size": 4},
        {"mask_function": causal, "local_size": 3},
        {"mask_function": causal, "use_vmap": True},
    ):
        with pytest.raises(ValueError, match="mask is not supported"):
            padding_mask(**sizes, **options)


def test_masks_that_change_are_refused(llama: Any, cache: TurboQuantCache) -> None:
    tokens, mask = make_tokens(batch=2), torch.ones(2, 21)
    mask[0, :3] = 0
    forward(llama, tokens[:, :20], cache, mask[:, :20])
    changed = mask.clone()
    changed[0, 0] = 1
    for wrong in (None, changed):
        with pytest.raises(ValueError, match="differs from the earlier one"):
            forward(llama, tokens[:, 20:], cache, wrong)
        cache.reset()
        forward(llama, tokens[:, :20], cache, mask[:, :20])


def test_a_mask_edited_in_place_is_noticed(llama: Any, cache: TurboQuantCache) -> None:
    tokens, mask = make_tokens(batch=2), torch.ones(2, 21, dtype=torch.bool)
    mask[0, :3] = False
    append(cache, *make_states(rows=21), mask)
    mask[0, 0] = True
    with pytest.raises(ValueError, match="differs from the earlier one"):
        forward(llama, tokens[:, :1], cache, torch.nn.functional.pad(mask, (0, 1), value=True))


def test_another_batch_is_refused(llama: Any, cache: TurboQuantCache) -> None:
    forward(llama, make_tokens(batch=2), cache)
    with pytest.raises(ValueError, match="2 sequences, got 3"):
        forward(llama, make_tokens(batch=3), cache)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"dropout": 0.1}, "inference"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 5}, "sliding_window"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
    ids=["dropout", "bidirectional", "window", "bias"],
)
def test_options_that_are_refused(
    cache: TurboQuantCache, options: dict[str, Any], match: str
) -> None:
    key, value = cache.update(*make_states(), 0)
    with pytest.raises(ValueError, match=match):
        turboquant_attention(Causal(), key, key, value, None, **options)


def test_values_of_another_size_are_refused(cache: TurboQuantCache) -> None:
    key, value = make_states()
    with pytest.raises(ValueError, match="head_dim"):
        cache.update(key, value[..., :8], 0)


def test_export_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="cannot be exported"):
        torch.export.export(llama, (make_tokens(),), kwargs={"use_cache": False}, strict=False)


def test_a_static_cache_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="TurboQuantCache"):
        generate(llama, make_tokens(), None, cache_implementation="static")


def test_transformers_missing_says_what_to_install() -> None:
    result = run_without(["transformers"], "import tq_torch; import tq_torch.hf")
    assert result.returncode
    assert "pip install transformers" in result.stderr


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_docstring_example_runs() -> None:
    failed, tried = doctest.testmod(tq_torch.hf.cache)
    assert tried
    assert not failed


def test_continuous_batching_is_refused(llama: Any) -> None:
    paged = transformers.AttentionInterface()["paged|turboquant"]
    with pytest.raises(ValueError, match="continuous batching"):
        paged()
