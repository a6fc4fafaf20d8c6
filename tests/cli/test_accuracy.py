"""``tq calibrate`` and ``tq eval``, on a small model with random weights."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest

from tq_cli import language_model
from tq_core.codec import load_codecs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{n}" for n in range(40)] + list("0123456789") + ["?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of transformers, and a text."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(20)
    model.save_pretrained(path)
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence([split.Whitespace(), split.Digits(True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    rng = torch.Generator().manual_seed(0)
    # A digit follows a letter's word, so that words are of one token each.
    words = [f"? {int(n)}" for n in torch.randint(10, (1500,), generator=rng)]
    (path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    return path


@pytest.fixture
def calibrate(folder, tmp_path, tq):
    """Runs ``tq calibrate``; returns its report and the file."""

    def run(*more):
        out = tmp_path / "codecs"
        words = ["--model", folder, "--text", folder / "text.txt", "--out", out]
        words += ["--window", 512, "--own-tokens", 64, "--json", *more]
        return json.loads(tq("calibrate", *words)), load_codecs(out)

    return run


def test_calibrate_writes_a_codec_for_each_layer(calibrate):
    report, file = calibrate("--bits", 5)
    assert len(file.codecs) == len(report["layers"]) == 2
    assert file.model == {
        "name": file.model["name"], "num_layers": "2", "num_kv_heads": "2", "head_dim": "8",
    }  # fmt: skip
    assert report["bits"] <= 5
    assert file.report["layers"] == report["layers"]
    for codec, layer in zip(file.codecs, report["layers"], strict=True):
        assert (codec.config.key, codec.config.value) == (
            layer["config"]["key"],
            layer["config"]["value"],
        )
        cost = layer["divergence"]
        assert 0 < cost["keys"] + cost["values"] <= cost["plain"]
        assert layer["score_error"]["measured"] == pytest.approx(
            layer["score_error"]["predicted"], rel=0.3
        )


def test_the_model_writes_text_of_its_own_unless_told_not_to(calibrate):
    with_own, file = calibrate("--own-tokens", 1200)
    without, other = calibrate("--own-tokens", 0)
    assert (with_own["own_tokens"], without["own_tokens"]) == (1200, 0)
    assert with_own["tokens"] == without["tokens"]
    assert not np.array_equal(file.codecs[0].key_transform, other.codecs[0].key_transform)


def test_every_file_has_its_share(calibrate, folder, tmp_path):
    (tmp_path / "short").write_text("w1 w2 w3", encoding="utf-8")
    report, _ = calibrate("--text", folder / "text.txt", tmp_path / "short", "--tokens", 2500)
    assert report["tokens"] == 1250 + 6


def test_calibrate_with_one_preset(calibrate):
    report, _ = calibrate("--preset", "3bit")
    assert [layer["preset"] for layer in report["layers"]] == ["3bit", "3bit"]


def test_the_report_of_calibrate_in_words(folder, tmp_path, tq):
    out = tq(
        *("calibrate", "--model", folder, "--text", folder / "text.txt", "--window", 512),
        *("--out", tmp_path / "codecs", "--own-tokens", 0),
    )
    assert "score error" in out
    assert f"written: {tmp_path / 'codecs'}" in out


def test_eval_compares_caches(calibrate, folder, tmp_path, tq):
    calibrate()
    table, plot = tmp_path / "rows.csv", tmp_path / "plot.png"
    words = ["eval", "--model", folder, "--text", folder / "text.txt", "--tokens", 200]
    words += ["--chunk", 64, "--presets", "4bit", "2bit", "--seeds", 2, "--lengths", 150]
    words += ["--codecs", tmp_path / "codecs", "--csv", table, "--json"]
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", plot]
    result = json.loads(tq(*words))
    rows = {row["cache"]: row for row in result["caches"]}
    assert list(rows) == ["16 bit", "4bit", "2bit", "4bit, calibrated", "2bit, calibrated", "file"]
    assert rows["16 bit"]["divergence"] == 0
    assert 0 < rows["4bit"]["divergence"] < rows["2bit"]["divergence"]
    assert len(rows["4bit"]["perplexities"]) == 2
    assert all(row["key_of"] in (15, 30) for row in rows.values())
    with table.open(encoding="utf-8") as stream:
        written = list(csv.DictReader(stream))
    assert [row["cache"] for row in written] == list(rows)
    assert float(written[1]["perplexity"]) == rows["4bit"]["perplexity"]
    assert plot.exists() == ("--plot" in words)


def test_the_table_of_eval(folder, tq):
    out = tq(
        *("eval", "--model", folder, "--text", folder / "text.txt", "--tokens", 100),
        *("--presets", "k8v8", "--lengths", 150, "--depths", 0.5),
    )
    assert "top-1" in out
    assert "150 at 50%" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--presets", "5bit"], "--presets: preset: expected one of"),
        (["--depths", "2"], "--depths: expected numbers from 0 to 1, got [2.0]"),
        (["--codecs", "nothing"], "--codecs: nothing does not exist"),
        (["--csv", "no/rows.csv"], "--csv: "),
        (["--lengths", "100000"], "--lengths: 100000 tokens need a text of"),
    ],
)
def test_eval_refuses(words, message, folder, tq_error):
    out = tq_error(
        *("eval", "--model", folder, "--text", folder / "text.txt"),
        *("--tasks", "passkey", *words),
    )
    assert out.startswith("tq eval: " + message)


def test_eval_refuses_codecs_of_another_model(folder, tmp_path, tq_error):
    from tq_core import Codec, QuantConfig
    from tq_core.codec import save_codecs

    save_codecs(tmp_path / "codecs", [Codec(QuantConfig(), 8)])
    out = tq_error(
        *("eval", "--model", folder, "--text", folder / "text.txt"),
        *("--codecs", tmp_path / "codecs"),
    )
    assert "expected codecs for a model of 2 layers, got 1" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tokens", "600"], "text: expected at least 768 fitting tokens"),
        (["--bits", "1"], "--bits: expected at least "),
        (["--out", "no/codecs"], "--out: "),
        (["--device", "nowhere"], "--model: "),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
    ],
)
def test_calibrate_refuses(words, message, folder, tmp_path, tq_error):
    out = tq_error(
        *("calibrate", "--model", folder, "--text", folder / "text.txt"),
        *("--out", tmp_path / "codecs", "--own-tokens", 0, *words),
    )
    assert out.startswith("tq calibrate: " + message)
    assert not (tmp_path / "codecs").exists()


@pytest.mark.parametrize("command", ["calibrate", "eval"])
@pytest.mark.parametrize(
    "model, text, message",
    [
        ("nothing", "text.txt", "--model: nothing does not exist"),
        ("text.txt", "text.txt", "--model: expected a directory or a .gguf file"),
        (".", "no.txt", "--text: "),
        (".", "model.safetensors", "--text: "),
    ],
)
def test_models_and_texts_that_are_none(command, model, text, message, folder, tq_error):
    model = folder / model if model != "nothing" else model
    out = tq_error(command, "--model", model, "--text", folder / text)
    assert out.startswith(f"tq {command}: {message}")


def test_a_missing_package_is_named(folder, monkeypatch, tq_error):
    monkeypatch.setattr(language_model, "find_spec", lambda name: None)
    out = tq_error("calibrate", "--model", folder, "--text", folder / "text.txt")
    assert out.startswith("tq calibrate: needs torch, which is not installed: pip install")
