"""``generate`` on whole models, against plain attention over the unpacked cache."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.hf.models import (
    CACHE,
    MODELS,
    ORACLE,
    PROMPT,
    forward,
    generate,
    logits_of,
    make_cache,
    make_model,
    make_tokens,
    relative_error,
)

TOLERANCE = 1e-4
PRESETS = ["k8v8", "4bit", "3bit_hq", "2bit"]
WINDOWS = ["llama", "mistral", "gemma2", "gpt_oss"]


@pytest.mark.parametrize("name", MODELS)
def test_generate_equals_the_oracle(name: str) -> None:
    model, tokens = make_model(name), make_tokens(batch=2)
    actual = generate(model, tokens, make_cache(model))
    model.set_attn_implementation(ORACLE)
    expected = generate(model, tokens, make_cache(model))
    assert torch.equal(actual.sequences, expected.sequences)
    assert relative_error(logits_of(actual), logits_of(expected)) < TOLERANCE


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_equal_the_oracle(preset: str) -> None:
    model, tokens = make_model("gemma2"), make_tokens()
    actual = forward(model, tokens, make_cache(model, preset))
    model.set_attn_implementation(ORACLE)
    expected = forward(model, tokens, make_cache(model, preset))
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_k8v8_is_close_to_16_bit(name: str) -> None:
    model, tokens = make_model(name), make_tokens(batch=2)
    actual = forward(model, tokens, make_cache(model, "k8v8"))
    model.set_attn_implementation("eager")
    expected = forward(model, tokens, transformers.DynamicCache(config=model.config))
    assert relative_error(actual, expected) < 0.04


def test_bfloat16_equals_the_oracle() -> None:
    model, tokens = make_model("qwen3").bfloat16(), make_tokens()
    actual = forward(model, tokens, make_cache(model)).float()
    model.set_attn_implementation(ORACLE)
    expected = forward(model, tokens, make_cache(model)).float()
    assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize("name", WINDOWS)
def test_left_padding_equals_single_runs(name: str) -> None:
    model, pads = make_model(name), [0, 5, 13]
    tokens = make_tokens(batch=3)
    mask = torch.arange(tokens.shape[1]) >= torch.tensor(pads)[:, None]
    padded = tokens.masked_fill(~mask, 0)
    together = generate(model, padded, make_cache(model), attention_mask=mask.long())
    for b, pad in enumerate(pads):
        alone = generate(model, tokens[b : b + 1, pad:], make_cache(model))
        assert torch.equal(together.sequences[b, pad:], alone.sequences[0])
        assert relative_error(logits_of(together)[:, b], logits_of(alone)[:, 0]) < TOLERANCE


@pytest.mark.parametrize("name", WINDOWS)
def test_padding_anywhere_equals_the_oracle(name: str) -> None:
    model, tokens = make_model(name), make_tokens(batch=3)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 15:], mask[1, 4:9], mask[2] = False, False, False
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for attention in ("turboquant", ORACLE):
        model.set_attn_implementation(attention)
        cache = make_cache(model)
        with torch.no_grad():
            for start, stop in [(0, 12), (12, 20), (20, 21)]:
                output = model(
                    tokens[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=position_ids[:, start:stop],
                    **{CACHE: cache},
                )
                logits.append(output.logits)
    half = len(logits) // 2
    actual, expected = torch.cat(logits[:half], 1), torch.cat(logits[half:], 1)
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("preset", ["k8v8", "4bit"])
def test_beams_score_what_a_single_pass_does(preset: str) -> None:
    model, tokens = make_model("mistral"), make_tokens(batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    cache, fresh = (make_cache(model, preset, page_size=4) for _ in range(2))
    options = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    output = generate(model, tokens, cache, attention_mask=mask, max_new_tokens=12, **options)
    mask = torch.nn.functional.pad(mask.repeat_interleave(3, 0), (0, 12), value=1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(
            output.sequences, attention_mask=mask, position_ids=position_ids, **{CACHE: fresh}
        ).logits
    scores = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    chosen = scores.gather(-1, output.sequences[:, PROMPT:, None])[..., 0]
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    torch.testing.assert_close(chosen.mean(1), output.sequences_scores, rtol=1e-4, atol=1e-4)


def test_beam_search_equals_16_bit() -> None:
    model, tokens = make_model("mistral"), make_tokens(batch=2)
    options = {"num_beams": 3, "max_new_tokens": 12}
    actual = generate(model, tokens, make_cache(model, "k8v8", page_size=4), **options)
    model.set_attn_implementation("eager")
    dynamic = transformers.DynamicCache(config=model.config)
    assert torch.equal(actual.sequences, generate(model, tokens, dynamic, **options).sequences)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted_decoding_equals_plain(name: str) -> None:
    model = make_model(name)
    tokens = make_tokens(length=5).repeat(1, 4)
    plain = generate(model, tokens, make_cache(model), max_new_tokens=12)
    lookup = generate(
        model, tokens, make_cache(model), max_new_tokens=12, prompt_lookup_num_tokens=3
    )
    assert torch.equal(plain.sequences, lookup.sequences)
    assistant = make_model(name, "eager")
    with torch.no_grad():  # an assistant that is wrong now and then
        assistant.lm_head.weight.add_(0.05 * torch.randn_like(assistant.lm_head.weight))
    assisted = generate(
        model, tokens, make_cache(model), max_new_tokens=12, assistant_model=assistant
    )
    assert torch.equal(plain.sequences, assisted.sequences)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_second_turn_equals_a_fresh_cache(name: str) -> None:
    model, tokens = make_model(name), make_tokens(batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    cache = make_cache(model)
    first = generate(model, tokens, cache, attention_mask=mask).sequences
    tokens = torch.cat([first, make_tokens(batch=2, length=6, seed=1)], 1)
    mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    second = generate(model, tokens, cache, attention_mask=mask)
    fresh = generate(model, tokens, make_cache(model), attention_mask=mask)
    assert torch.equal(second.sequences, fresh.sequences)
    assert relative_error(logits_of(second), logits_of(fresh)) < TOLERANCE


def test_prefill_in_chunks_equals_one() -> None:
    model, tokens = make_model("gpt_oss"), make_tokens(batch=2)
    whole = generate(model, tokens, make_cache(model))
    chunks = generate(model, tokens, make_cache(model), prefill_chunk_size=4)
    assert torch.equal(whole.sequences, chunks.sequences)
    assert relative_error(logits_of(chunks), logits_of(whole)) < TOLERANCE
