"""Tokens in 16 bit: ``recent`` and ``first``, against a cache in which they are exact.

What a row reads depends on its position alone, so one pass of the oracle over the whole text is
the answer to every way of getting there: steps, chunks, crops, beams, turns.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.models import (
    CACHE,
    MODELS,
    ORACLE,
    PROMPT,
    WINDOW,
    forward,
    generate,
    logits_of,
    make_cache,
    make_model,
    make_tokens,
    relative_error,
)
from tq_torch.hf import TurboQuantCache
from tq_torch.hf.cache import _ROWS
from tq_torch.hf.columns import Columns
from tq_torch.hf.exact import MAX_CROP

TOLERANCE = 1e-4
CASES = [(5, 0), (0, 3), (5, 3), (1, 1), (WINDOW, 2), (WINDOW + 4, 0), (64, 0), (0, 64)]


def padded(batch: int, pads: list[int], length: int = PROMPT) -> tuple[Tensor, Tensor]:
    mask = torch.arange(length) >= torch.tensor(pads)[:, None]
    return make_tokens(batch, length).masked_fill(~mask, 0), mask


def run(
    model: Any, tokens: Tensor, mask: Tensor, cache: TurboQuantCache, start: int, stop: int
) -> Tensor:
    """Logits of the columns from ``start`` to ``stop``, positions counted without padding."""
    with torch.no_grad():
        return model(
            tokens[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop],
            **{CACHE: cache},
        ).logits


def oracle_logits(model: Any, tokens: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """``[B, T, vocabulary]`` of one pass."""
    attention = model.config._attn_implementation
    model.set_attn_implementation(ORACLE)
    cache = make_cache(model, **options)
    for layer in cache.layers:
        layer.sliding_window = None  # keeps all pages, whatever the oracle then reads
    logits = run(model, tokens, mask, cache, 0, tokens.shape[1])
    model.set_attn_implementation(attention)
    return logits


def check_generated(model: Any, output: Any, mask: Tensor, **options: Any) -> None:
    """The logits of every new token are the oracle's over the whole text."""
    new = len(output.logits)
    mask = torch.nn.functional.pad(mask, (0, output.sequences.shape[1] - mask.shape[1]), value=1)
    expected = oracle_logits(model, output.sequences, mask.bool(), **options)[:, -new - 1 : -1]
    assert relative_error(logits_of(output).transpose(0, 1), expected) < TOLERANCE


@pytest.mark.parametrize("recent, first", CASES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_one_pass_equals_the_oracle(name: str, recent: int, first: int) -> None:
    model, (tokens, mask) = make_model(name), padded(3, [0, 4, 18])
    options = {"preset": "2bit", "recent": recent, "first": first}
    actual = run(model, tokens, mask, make_cache(model, **options), 0, PROMPT)
    expected = oracle_logits(model, tokens, mask, **options)
    assert relative_error(actual[mask], expected[mask]) < TOLERANCE
    packed = oracle_logits(model, tokens, mask, preset="2bit")
    assert relative_error(packed[mask], expected[mask]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_generate_with_left_padding(name: str) -> None:
    model, (tokens, mask) = make_model(name), padded(3, [0, 4, 18])
    options = {"preset": "2bit", "recent": 5, "first": 3}
    output = generate(model, tokens, make_cache(model, **options), attention_mask=mask.long())
    check_generated(model, output, mask, **options)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_everything_in_16_bit_equals_a_plain_cache(name: str) -> None:
    model, tokens = make_model(name), make_tokens(batch=2)
    actual = forward(model, tokens, make_cache(model, "2bit", recent=PROMPT))
    model.set_attn_implementation("eager")
    expected = forward(model, tokens, None)
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("cuts", [[1, 2, 3, 9, 10, 21], [4, 21]], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_chunks_and_padding_anywhere(name: str, cuts: list[int]) -> None:
    model, tokens = make_model(name), make_tokens(batch=3)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 15:], mask[1, 1:9], mask[2, ::2] = False, False, False
    options = {"preset": "2bit", "recent": 4, "first": 2}
    expected = oracle_logits(model, tokens, mask, **options)
    cache, edges = make_cache(model, **options), itertools.pairwise([0, *cuts])
    logits = [run(model, tokens, mask, cache, start, stop) for start, stop in edges]
    assert relative_error(torch.cat(logits, 1)[mask], expected[mask]) < TOLERANCE


@pytest.mark.parametrize("pads", [[0, 0], [0, 5]], ids=str)
def test_crop(pads: list[int]) -> None:
    model, (tokens, mask) = make_model("mistral"), padded(2, pads)
    options = {"preset": "2bit", "recent": 4, "first": 2}
    cache = make_cache(model, **options)
    wrong = tokens.clone()
    wrong[:, 10:] = 50
    run(model, wrong, mask, cache, 0, 18)
    cache.crop(-5)
    cache.crop(-3)
    actual = run(model, tokens, mask, cache, 10, PROMPT)
    expected = oracle_logits(model, tokens, mask, **options)[:, 10:]
    assert relative_error(actual, expected) < TOLERANCE


def test_crop_of_columns_with_padding() -> None:
    model, tokens = make_model("llama"), make_tokens(batch=2)
    options = {"preset": "2bit", "recent": 6, "first": 2}
    cache, mask = make_cache(model, **options), torch.ones_like(tokens, dtype=torch.bool)
    padding_later = mask.clone()
    padding_later[0, 14:17] = False
    run(model, tokens, padding_later, cache, 0, 18)
    cache.crop(-5)
    actual = run(model, tokens, mask, cache, 13, PROMPT)
    expected = oracle_logits(model, tokens, mask, **options)[:, 13:]
    assert relative_error(actual, expected) < TOLERANCE


def test_reset_takes_another_batch() -> None:
    model, tokens = make_model("llama"), make_tokens(batch=3)
    options = {"preset": "2bit", "recent": 6, "first": 2}
    cache, mask = make_cache(model, **options), torch.ones_like(tokens, dtype=torch.bool)
    run(model, tokens, mask, cache, 0, PROMPT)
    cache.reset()
    actual = run(model, tokens[:2], mask[:2], cache, 0, PROMPT)
    assert torch.equal(
        actual, run(model, tokens[:2], mask[:2], make_cache(model, **options), 0, PROMPT)
    )


def test_slots_leave_out_padding_and_the_first_tokens_and_begin_again() -> None:
    columns, mask = Columns(), torch.tensor([[1] * 6, [0, 0, 1, 1, 0, 1]]).bool()
    columns.append(0, (2, 6), mask)
    slots = columns.step(0, 6, torch.device("cpu")).slots(3, first=2)
    assert slots.view(2, 6).tolist() == [[-1, -1, 0, 1, 2, 0], [-1, -1, -1, -1, -1, 3]]


def test_beams() -> None:
    model, (tokens, mask) = make_model("mistral"), padded(2, [0, 6])
    options = {"preset": "2bit", "recent": 4, "first": 2}
    output = generate(
        model,
        tokens,
        make_cache(model, **options, page_size=4),
        attention_mask=mask.long(),
        max_new_tokens=12,
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
    )
    mask = torch.nn.functional.pad(mask.repeat_interleave(3, 0), (0, 12), value=True)
    logits = oracle_logits(model, output.sequences, mask, **options)
    scores = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    chosen = scores.gather(-1, output.sequences[:, PROMPT:, None])[..., 0]
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    torch.testing.assert_close(chosen.mean(1), output.sequences_scores, rtol=1e-4, atol=1e-4)


def test_assisted_decoding_and_a_second_turn() -> None:
    model, tokens = make_model("mistral"), make_tokens(length=5).repeat(1, 4)
    options = {"preset": "2bit", "recent": 4, "first": 2}
    cache = make_cache(model, **options)
    first = generate(model, tokens, cache, max_new_tokens=12, prompt_lookup_num_tokens=3)
    check_generated(model, first, torch.ones_like(tokens), **options)
    tokens = torch.cat([first.sequences, make_tokens(length=6, seed=1)], 1)
    second = generate(model, tokens, cache)
    check_generated(model, second, torch.ones_like(tokens), **options)


@pytest.mark.parametrize("pads", [[0, 0], [0, 200]], ids=str)
@pytest.mark.parametrize(
    "name, recent, first", [("llama", 7, 2), ("gemma2", 0, 0), ("gemma2", 7, 2)]
)
def test_long_texts_forget_what_no_row_sees(
    name: str, recent: int, first: int, pads: list[int]
) -> None:
    model, length = make_model(name), 2 * _ROWS + 150
    tokens, mask = padded(2, pads, length)
    options = {"preset": "2bit", "recent": recent, "first": first}
    cache = make_cache(model, **options)
    expected = oracle_logits(model, tokens, mask, **options)
    wrong = tokens.clone()
    wrong[:, 500:] = 50
    run(model, wrong, mask, cache, 0, _ROWS + 40)
    run(model, wrong, mask, cache, _ROWS + 40, 500 + MAX_CROP)
    sliding, full = cache.layers
    if name == "gemma2":
        assert sliding.pages.numel() < full.pages.numel() / 2
    if recent:
        kept = sliding.exact.nbytes // (2 * 2 * 2 * sliding.layout.head_dim * 4)  # keys, values
        assert kept <= recent - 1 + MAX_CROP + _ROWS + first + 1
    with pytest.raises(ValueError, match=f"can be cropped to 500 at least, got {-MAX_CROP - 1}"):
        cache.crop(-MAX_CROP - 1)
    assert cache.get_seq_length() == 500 + MAX_CROP
    cache.crop(-MAX_CROP)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    cuts = [500, 501, 502, length - 20, length]
    logits = [run(model, tokens, mask, cache, *edge) for edge in itertools.pairwise(cuts)]
    actual, expected, mask = torch.cat(logits, 1), expected[:, 500:], mask[:, 500:]
    assert relative_error(actual[mask], expected[mask]) < TOLERANCE


def test_full_attention_crops_to_anything() -> None:
    model, tokens = make_model("llama"), make_tokens(length=400)
    mask, cache = torch.ones_like(tokens), make_cache(model, "2bit", first=2)
    run(model, tokens, mask, cache, 0, 400)
    cache.crop(-390)
    expected = oracle_logits(model, tokens[:, :30], mask[:, :30].bool(), preset="2bit", first=2)
    assert relative_error(run(model, tokens, mask, cache, 10, 30), expected[:, 10:]) < TOLERANCE


def test_nan_of_a_token_reaches_no_other() -> None:
    cache = make_cache(make_model("llama"), recent=4, first=2)
    key, value, query = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    key[:, :, 8], value[:, :, 8], value[:, :, 1] = torch.nan, torch.inf, torch.nan
    layer = cache.layers[0]
    cache.update(key, value, 0)
    assert layer.attend(query, None)[:, :8].isfinite().all()


def test_wrong_numbers_are_refused() -> None:
    model = make_model("llama")
    for name in ("recent", "first", "num_tokens"):
        for number in (-1, 1.5, True):
            with pytest.raises(ValueError, match=f"{name}: expected a number of tokens"):
                TurboQuantCache(model.config, **{name: number})
