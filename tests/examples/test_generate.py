"""Generation for a batch of ragged prompts, in both frameworks."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from examples import demo, generate, llama_jax, llama_torch
from examples.batch import pack
from examples.tokenizer import encode, load_tokenizer
from examples.weights import load_model
from tests.examples.models import (
    PROMPT_LENS,
    VOCAB,
    make_prompts,
    make_weights,
    shortfall,
    stored_of,
    with_ends,
    write_checkpoint,
)
from tq_core import QuantConfig

NEW = 20
FRAMEWORKS = pytest.mark.parametrize("module", [llama_torch, llama_jax], ids=["torch", "jax"])
SLOW = [pytest.param(preset, marks=pytest.mark.slow) for preset in ("k8v8", "4bit_hq")]
CACHES = pytest.mark.parametrize("preset", [None, "k8v4", "4bit", "3bit", *SLOW])


@pytest.fixture(scope="module")
def weights():
    return make_weights(tied=False)


def quant_of(preset):
    return None if preset is None else QuantConfig.preset(preset)


def new_cache(llama, preset, prompts, new=NEW):
    """Room for the prompts and ``new`` tokens; mostly the same, so that programs are shared."""
    room = [len(prompt) + new for prompt in prompts]
    return llama.new_cache(quant_of(preset), [64] * 4 if sum(room) <= 4 * 49 else room)


def write(module, weights, preset, prompts, new=NEW, **options):
    llama = module.Llama(weights)
    return llama.generate(prompts, new_cache(llama, preset, prompts, new), new, **options)


def one_by_one(module, weights, preset, prompts, new=NEW):
    """The same by single steps, a sequence after the other."""
    llama = module.Llama(weights)
    written = []
    for prompt in prompts:
        cache = new_cache(llama, preset, [prompt], new)
        tokens = [int(llama(prompt, cache)[-1].argmax())]
        while len(tokens) < new:
            tokens.append(int(llama(tokens[-1:], cache)[-1].argmax()))
        written.append(tokens)
    return written


@CACHES
def test_jax_writes_what_torch_writes(weights, preset):
    prompts = make_prompts()
    by_torch = write(llama_torch, weights, preset, prompts)
    assert write(llama_jax, weights, preset, prompts) == by_torch
    assert [len(tokens) for tokens in by_torch] == [NEW] * 4
    assert len({token for tokens in by_torch for token in tokens}) > 20


@FRAMEWORKS
@pytest.mark.parametrize("preset", [None, "4bit"])
def test_the_loop_writes_what_single_steps_write(module, weights, preset):
    prompts = make_prompts()
    batch = write(module, weights, preset, prompts)
    assert one_by_one(module, weights, preset, prompts[:2]) == batch[:2]


@FRAMEWORKS
@pytest.mark.parametrize("preset", [None, "4bit"])
def test_a_sequence_does_not_depend_on_the_others(module, weights, preset):
    prompts = make_prompts()
    batch = write(module, weights, preset, prompts)
    for prompt, tokens in zip(prompts, batch, strict=True):
        assert write(module, weights, preset, [prompt]) == [tokens]
    others = make_prompts((20, 2, 9), seed=9)  # sizes that JAX has a program for
    assert write(module, weights, preset, [*others, prompts[1]])[3] == batch[1]


@FRAMEWORKS
@pytest.mark.parametrize("preset", [None, "4bit"])
def test_an_end_token_ends_its_sequence_alone(module, weights, preset):
    prompts = make_prompts()
    whole = write(module, weights, preset, prompts)
    ends = (whole[2][0], 38)
    want = []
    for tokens in whole:
        stops = [i for i, token in enumerate(tokens) if token in ends]
        want.append(tokens[: stops[0]] if stops else tokens)
    lens = sorted(map(len, want))
    assert lens[0] == 0 < lens[1] < lens[-1] == NEW
    assert write(module, with_ends(weights, *ends), preset, prompts) == want


@FRAMEWORKS
def test_the_batch_ends_with_its_last_sequence(module, weights, monkeypatch):
    prompts = make_prompts()
    ends = {tokens[2] for tokens in write(module, weights, "4bit", prompts)}
    steps = []
    attend = module.PackedCache.attend

    def count(cache, *arguments):
        if module is llama_jax:
            jax.debug.callback(lambda: steps.append(1))
        else:
            steps.append(1)
        return attend(cache, *arguments)

    monkeypatch.setattr(module.PackedCache, "attend", count)
    # Another bound than elsewhere, so that JAX traces what counts.
    written = write(module, with_ends(weights, *ends), "4bit", prompts, new=NEW + 1)
    jax.effects_barrier()
    longest = max(map(len, written))
    assert longest < 3
    assert len(steps) == weights.config.num_layers * (1 + longest)


def run_jitted(weights, prompts, new=NEW, cache=None, arrays=None, **changes):
    """The jitted function itself, its arguments as ``Llama.generate`` makes them."""
    llama = llama_jax.Llama(weights)
    session = new_cache(llama, "4bit", prompts, new)
    cache = session.cache if cache is None else cache
    batch = pack(prompts, new, llama_jax.PAGE_SIZE, cache.num_pages)
    arguments = {
        "ids": batch.ids,
        "query_start_loc": batch.query_start_loc,
        "block_table": batch.block_table,
        "arrays": session.arrays if arrays is None else arrays,
        **changes,
    }
    options = {"max_prompt_len": max(map(len, prompts)), "max_new_tokens": new}
    what = {"config": weights.config, "cache": cache, **options}
    return llama_jax.generate(llama.params, **arguments, **what), batch, cache


def test_what_has_ended_stores_nothing(weights):
    prompts = make_prompts()
    whole = write(llama_jax, weights, "4bit", prompts)
    ended = with_ends(weights, whole[1][7])
    (tokens, pool), batch, cache = run_jitted(ended, prompts)
    for b, prompt in enumerate(prompts):
        count = int((np.asarray(tokens)[b] != llama_jax.NO_TOKEN).sum())
        stored = stored_of(pool, cache, batch.block_table[b])
        # The last new token is never fed.
        fed = len(prompt) + count - (count == NEW)
        assert stored[:fed].all()
        assert not stored[fed:].any()
    assert (np.asarray(tokens)[1] != llama_jax.NO_TOKEN).sum() <= 7


def test_a_sequence_without_a_prompt_has_ended(weights):
    """So batches can be padded; rows past the last prompt pad too."""
    prompts = make_prompts()
    (want, _), batch, cache = run_jitted(weights, prompts)
    starts = batch.query_start_loc[[0, 0, 1, 2, 2, 3, 4, 4]]
    table = np.full((7, batch.block_table.shape[1] + 2), -1, np.int32)
    table[[1, 2, 4, 5], :-2] = batch.block_table
    ids = np.concatenate([batch.ids, np.full(9, 7, np.int32)])
    (tokens, _), _, _ = run_jitted(
        weights, prompts, cache=cache, ids=ids, query_start_loc=starts, block_table=table
    )
    tokens = np.asarray(tokens)
    assert np.array_equal(tokens[[1, 2, 4, 5]], want)
    assert (tokens[[0, 3, 6]] == llama_jax.NO_TOKEN).all()


def test_pages_may_lie_in_any_order(weights):
    prompts = make_prompts()
    (want, _), batch, cache = run_jitted(weights, prompts)
    order = np.random.default_rng(0).permutation(cache.num_pages).astype(np.int32)
    table = np.where(batch.block_table < 0, -1, order[batch.block_table])
    (tokens, _), _, _ = run_jitted(weights, prompts, block_table=table)
    assert np.array_equal(tokens, want)


@pytest.mark.parametrize("preset", [None, "4bit"])
def test_the_cache_is_donated(weights, preset):
    prompts = make_prompts()
    llama = llama_jax.Llama(weights)
    session = new_cache(llama, preset, prompts)
    old = jax.tree.leaves(session.arrays)
    first = llama.generate(prompts, session, NEW)
    assert all(array.is_deleted() for array in old)
    assert llama.generate(prompts, session, NEW) == first


def test_nothing_of_the_size_of_the_cache_is_copied(weights):
    llama = llama_jax.Llama(weights)
    prompts = make_prompts()
    session = llama.new_cache(quant_of("4bit"), 1 << 20)
    batch = pack(prompts, NEW, llama_jax.PAGE_SIZE, session.cache.num_pages)
    arguments = (batch.ids, batch.query_start_loc, batch.block_table, session.arrays)
    lowered = llama_jax.generate.lower(
        llama.params,
        *arguments,
        config=weights.config,
        cache=session.cache,
        max_prompt_len=max(PROMPT_LENS),
        max_new_tokens=NEW,
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == session.arrays.nbytes > 32 << 20
    assert memory.temp_size_in_bytes < 16 << 20


def test_other_lengths_compile_nothing(weights):
    llama = llama_jax.Llama(weights)
    session = llama.new_cache(quant_of("4bit"), [64] * 4)
    sampled = {"temperature": 0.7, "seed": 1}
    for options in ({}, sampled):
        llama.generate(make_prompts((1, 17, 5, 32)), session, NEW, **options)
    with jax.no_tracing():
        for lens in ((17, 3, 20, 1), (30, 1, 1, 1)):
            prompts = make_prompts(lens, seed=2)
            llama.generate(prompts, session, NEW)
            llama.generate(prompts, session, NEW, temperature=1.3, seed=7)
    with pytest.raises(RuntimeError, match="re-tracing"), jax.no_tracing():
        llama.generate(make_prompts((17, 33, 20, 1)), session, NEW)


@FRAMEWORKS
def test_a_cache_serves_one_batch_after_another(module, weights):
    """What an earlier batch left in the pages does not matter."""
    llama = module.Llama(weights)
    prompts, others = make_prompts(), make_prompts((9, 17, 2, 30), seed=4)
    cache = llama.new_cache(quant_of("4bit"), [64] * 4)
    first = llama.generate(prompts, cache, NEW)
    llama.generate(others, cache, NEW)
    llama(others[1], cache)
    assert llama.generate(prompts, cache, NEW) == first


# --- sampling -------------------------------------------------------------------------------------


@FRAMEWORKS
def test_draws_follow_the_softmax(module, weights):
    """800 sequences of one prompt: each token's share against its probability."""
    prompt = make_prompts((6,))[0]
    llama = module.Llama(weights)
    logits = llama(prompt, new_cache(llama, "k8v4", [prompt]))[-1].astype(np.float64) / 1.5
    share = np.exp(logits - logits.max())
    share /= share.sum()
    count = 800
    written = write(module, weights, "k8v4", [prompt] * count, 2, temperature=1.5, seed=3)
    seen = np.bincount([tokens[0] for tokens in written], minlength=VOCAB)
    deviation = np.sqrt(count * share * (1 - share))
    assert (np.abs(seen - count * share) <= 4.5 * deviation + 1).all()
    assert len({tokens[1] for tokens in written}) > 10


@FRAMEWORKS
def test_seeds_and_temperatures(module, weights):
    prompts = make_prompts()
    hot = {"temperature": 1.0, "seed": 3}
    written = write(module, weights, "4bit", prompts, **hot)
    assert write(module, weights, "4bit", prompts, **hot) == written
    assert write(module, weights, "4bit", prompts, temperature=1.0, seed=4) != written
    greedy = write(module, weights, "4bit", prompts)
    assert greedy != written
    assert write(module, weights, "4bit", prompts, temperature=1e-4, seed=3) == greedy
    same = write(module, weights, "4bit", [*[prompts[1]] * 2, *prompts[::2]], **hot)
    assert same[0] != same[1]


@FRAMEWORKS
def test_draws_do_not_depend_on_the_other_sequences(module, weights):
    prompts = make_prompts()
    hot = {"temperature": 1.0, "seed": 3}
    batch = write(module, weights, "4bit", prompts, **hot)
    assert write(module, weights, "4bit", prompts[:1], **hot) == batch[:1]
    others = make_prompts((3, 17, 2, 20), seed=8)  # sizes that JAX has a program for
    others[1] = prompts[1]
    assert write(module, weights, "4bit", others, **hot)[1] == batch[1]
    ended = write(module, with_ends(weights, batch[0][0]), "4bit", prompts[:2], **hot)
    assert ended[0] == []
    count = len(ended[1])
    assert ended[1] == batch[1][:count]


# --- what is refused, and the command -------------------------------------------------------------


@FRAMEWORKS
@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts: expected at least one token in each"),
        ([[1], []], {}, "prompts: expected at least one token in each"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ([[1] * 13], {}, "the 1 pages of 16 tokens that the cache has, .* take 2"),
        ([[1], [2]], {}, "got 2 prompts that with 4 new tokens take 2"),
        ([[1]], {"temperature": -1.0}, "temperature: expected 0 or a number from 1e-6 on, got -1"),
        ([[1]], {"temperature": 1e-39}, "temperature: expected 0 or a number from 1e-6 on"),
        ([[1]], {"temperature": float("nan")}, "temperature: expected 0 or a number"),
    ],
)
def test_refusals(module, weights, prompts, changes, message):
    llama = module.Llama(weights)
    cache = llama.new_cache(None, 16)
    with pytest.raises(ValueError, match=message):
        llama.generate(prompts, cache, **{"max_new_tokens": 4, **changes})
    assert len(llama.generate([[1] * 12], cache, 4)[0]) == 4


def write_tokenizer(folder):
    """A word for each token of the tiny model: w0, w1, ..."""
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("preset", ["4bit", "none"])
def test_the_command(tmp_path, capsys, preset):
    weights = make_weights()
    write_checkpoint(tmp_path, weights)
    write_tokenizer(tmp_path)
    command = ["w1 w2 w3", "w9", "--model", str(tmp_path), "--new-tokens", "5", "--preset", preset]
    printed = {}
    for framework in ("torch", "jax"):
        assert generate.main([*command, "--framework", framework]) == 0
        printed[framework], report = capsys.readouterr()
        assert re.search(rf"{framework}, cache {preset} of \d+ bytes a token: 2 seq", report)
        assert "10 new tokens" in report
    assert printed["torch"] == printed["jax"]
    name = None if preset == "none" else preset
    words = [" ".join(f"w{t}" for t in tokens) for tokens in
             write(llama_torch, weights, name, [[1, 2, 3], [9]], 5)]  # fmt: skip
    assert printed["torch"] == f"w1 w2 w3{words[0]}\n\nw9{words[1]}\n\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "5bit"],
        ["--new-tokens", "0"],
        ["--temperature", "-1"],
        ["--seed", "-1"],
        ["--model", "/nowhere"],
        ["--framework", "tf"],
    ],
)
def test_wrong_arguments_of_the_command_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        generate.parse(["a prompt", *arguments])
    assert error.value.code == 2
    assert arguments[0].strip("-") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, "k8v4", "4bit"])
def test_smollm2(preset):
    """Equal tokens; at 4 bit rounding may decide near ties, so each token must be one."""
    weights, path = load_model()
    tokenizer = load_tokenizer(path)
    texts = (
        "The best way to learn a language is",
        "Once upon a time",
        "It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife. However little known the feelings",
    )
    prompts = [encode(tokenizer, text) for text in texts]
    by_torch = write(llama_torch, weights, preset, prompts, 24)
    by_jax = write(llama_jax, weights, preset, prompts, 24)
    assert "immerse yourself" in tokenizer.decode(by_jax[0])
    if preset != "4bit":
        assert by_jax == by_torch
    judge = llama_torch.Llama(weights)
    for prompt, tokens in zip(prompts, by_jax, strict=True):
        assert shortfall(judge, prompt, tokens, new_cache(judge, preset, [prompt], 24)) < 0.2


@pytest.mark.parametrize("command", [generate.main, demo.main], ids=["generate", "demo"])
def test_a_model_without_a_tokenizer_is_refused(tmp_path, capsys, command):
    write_checkpoint(tmp_path, make_weights())
    prompt = ["w1"] if command is generate.main else []
    with pytest.raises(SystemExit) as error:
        command([*prompt, "--model", str(tmp_path)])
    assert error.value.code == 2
    assert capsys.readouterr() == ("", f"{tmp_path} holds no tokenizer.json\n")


def test_a_prompt_that_is_no_text_is_refused(capsys):
    with pytest.raises(SystemExit):
        generate.parse(["bad\udcff"])
    assert "UTF-8" in capsys.readouterr().err
