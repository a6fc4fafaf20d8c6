"""``tq plan`` against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tq_cli import plan
from tq_cli.errors import CommandError
from tq_cli.machine import Device, Machine
from tq_cli.main import main
from tq_cli.model import Model, parse_model
from tq_cli.plan import longest, sequence_bytes
from tq_cli.sizes import parse_share, parse_size
from tq_core import PRESETS

#: The sizes of Gemma-2-9B: every second layer has a window, which the file does not say.
GEMMA = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
SMALL = {"num_attention_heads": 4, "num_hidden_layers": 4, "head_dim": 64}


def model(**keys) -> Model:
    return parse_model({**SMALL, **keys})


def rows(result: dict) -> dict[str, dict]:
    return {row["preset"]: row for row in result["presets"]}


def plan_json(tq, *arguments) -> dict:
    return json.loads(tq("plan", *arguments, "--json"))


# --- arithmetic -------------------------------------------------------------------------------


def test_llama(tq, config_file):
    result = plan_json(tq, config_file(), "--memory", "80GB")
    # 2 * 128256 * 4096 of embeddings; a layer has 2 * 4096 * 128 * (32 + 8) of attention,
    # 3 * 4096 * 14336 of MLP and 2 * 4096 of norms; 4096 of the last norm.
    assert result["weights"] == 2 * 8_030_261_248
    assert result["reserve"] == 8_000_000_000
    assert result["cache"] == 55_939_477_504
    by_name = rows(result)
    assert list(by_name) == ["16 bit", *PRESETS]
    base, packed = by_name["16 bit"], by_name["4bit"]
    assert base["bytes_per_token"] == 32 * 8 * 128 * 2 * 2
    assert base["tokens"] == 426_784
    assert base["sequences"] == 52
    assert packed["bytes_per_token"] == 32 * 8 * 134
    assert packed["tokens"] == packed["each"] == 1_630_698
    assert packed["sequences"] == 199
    assert packed["ratio"] == pytest.approx(512 / 134, abs=1e-4)
    assert not any(row["reasons"] for row in result["presets"])


def test_gemma_has_windows(tq, config_file):
    arguments = ("--memory", "40GB", "--weights", "18GB", "--reserve", "2GB", "--length", "10000")
    result = plan_json(tq, config_file(GEMMA), *arguments)
    assert result["model"]["window_layers"] == 21
    assert result["cache"] == 20_000_000_000
    layer = 8 * (128 + 128 + 3 * 2)  # 4-bit keys and values, three fields
    packed = rows(result)["4bit"]
    assert packed["bytes_per_token"] == 42 * layer == 88_032
    assert packed["sequences"] == 20_000_000_000 // (21 * layer * (10_000 + 4096)) == 32
    # 2e10 // (21 * 2096) is 454380, of which the 21 windows take as much as 4096 tokens.
    assert packed["tokens"] == 454_380 - 4096
    text = tq("plan", config_file(GEMMA), *arguments)
    assert "21 of the layers have a sliding window: they count at most 4,096 tokens" in text


def test_a_batch_shares_the_cache_equally(tq, config_file):
    result = plan_json(tq, config_file(), "--memory", "80GB", "--batch", "64")
    packed = rows(result)["4bit"]
    assert packed["each"] == 55_939_477_504 // 64 // 34_304 == 25_479
    assert packed["tokens"] == 64 * 25_479


@pytest.mark.parametrize("full, windowed", [(4, 0), (2, 2), (1, 3)])
@pytest.mark.parametrize("size", [0, 1, 2789, 4000, 4001, 5000, 123_457])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(full, windowed, size):
    sizes = Model("x", full, windowed, 100 if windowed else 0, 1, 64, None, None, False)
    tokens = longest(sizes, 10, size)
    assert tokens is not None
    assert sequence_bytes(sizes, 10, tokens) <= size < sequence_bytes(sizes, 10, tokens + 1)


def test_windows_alone_have_no_longest_sequence(tq, config_file):
    file = config_file(model_type="mistral", sliding_window=4096)
    result = plan_json(tq, file, "--memory", "80GB", "--length", "1000000")
    packed = rows(result)["4bit"]
    assert packed["unlimited"]
    assert packed["tokens"] is packed["each"] is None
    assert packed["sequences"] == 55_939_477_504 // (34_304 * 4096)
    assert re.search(r"^4bit .* any +398$", tq(*f"plan {file} --memory 80GB".split()), re.M)


# --- what a config says -----------------------------------------------------------------------


def test_head_dim_is_derived_and_kv_heads_default_to_heads():
    sizes = model(head_dim=None, hidden_size=320)
    assert (sizes.head_dim, sizes.num_kv_heads, sizes.num_layers) == (80, 4, 4)


def test_text_config_is_entered():
    nested = {"text_config": {**SMALL, "num_key_value_heads": 2}, "vision_config": {}}
    sizes = parse_model({"model_type": "outer", "num_attention_heads": 99, **nested})
    assert (sizes.model_type, sizes.num_kv_heads, sizes.has_vision) == ("outer", 2, True)


@pytest.mark.parametrize(
    "keys, windowed",
    [
        ({}, 0),
        ({"sliding_window": 8}, 4),
        ({"sliding_window": 8, "use_sliding_window": False}, 0),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"sliding_window": 8, "sliding_window_pattern": 4}, 3),
        ({"sliding_window": 8, "model_type": "gemma3_text", "num_hidden_layers": 13}, 11),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 4}, 0),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
        ({"sliding_window": 8, "num_kv_shared_layers": 1}, 3),
    ],
)
def test_windowed_layers(keys, windowed):
    assert model(**keys).window_layers == windowed


def test_tied_embeddings_count_once(config_file):
    keys = json.loads(config_file().read_text())
    untied = parse_model(keys).parameters
    assert untied is not None
    assert parse_model({**keys, "tie_word_embeddings": True}).parameters == untied - 128256 * 4096


def test_experts_are_counted():
    keys = {"hidden_size": 256, "vocab_size": 10, "num_experts": 8, "moe_intermediate_size": 32}
    layer = 2 * 256 * 64 * 8 + 8 * (3 * 256 * 32 + 256) + 2 * 256
    assert model(**keys).parameters == 2 * 10 * 256 + 4 * layer + 256


# --- weights and memory -----------------------------------------------------------------------


def test_weights_of_files(tq, config_file):
    file = config_file()
    folder = file.parent
    (folder / "a.safetensors").write_bytes(b"0" * 1000)
    (folder / "b.safetensors").write_bytes(b"0" * 500)
    arguments = ("plan", folder, "--memory", "1GB", "--json")
    assert json.loads(tq(*arguments))["weights"] == 1500
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    assert json.loads(tq(*arguments))["weights"] == 1000
    result = plan_json(tq, folder, "--memory", "80GB", "--weight-bits", "4")
    assert result["weights"] == 8_030_261_248 // 2
    index.write_text(json.dumps({"weight_map": {"x": "missing.safetensors"}}))
    assert plan_json(tq, folder, "--memory", "80GB")["weights"] == 2 * 8_030_261_248


def test_device_asks_the_gpu(tq, config_file, monkeypatch):
    gpu = Machine("cuda", [Device("cuda:0", "NVIDIA H200", 150_000_000_000)])
    monkeypatch.setattr(plan, "inspect", lambda framework: gpu)
    assert plan_json(tq, config_file(), "--device")["memory"] == 150_000_000_000


def test_device_without_a_gpu(tq_error, config_file, monkeypatch):
    found = {"torch": Machine(), "jax": Machine(reason="jax is not installed")}
    monkeypatch.setattr(plan, "inspect", found.get)
    line = tq_error("plan", config_file(), "--device")
    assert line == (
        "tq plan: --device: torch sees no GPU, and jax is not installed; use --memory instead"
    )


@pytest.mark.parametrize(
    "text, size",
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1.5gb", 1_500_000_000),
        (".5MiB", 2**19),
        ("7B", 7),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size("x", text) == size


@pytest.mark.parametrize("text", ["", "80", "GB", "-1GB", "80 G B", "8e1GB", "80Gb/s", "9" * 400])
def test_bad_sizes(text):
    with pytest.raises(CommandError, match=r"^x: expected a size such as 80GB"):
        parse_size("x", text)


def test_shares():
    assert parse_share("x", "12.5%", 1000) == 125
    assert parse_share("x", "5GB", 1000) == 5 * 10**9
    for text in ("100%", "-1%", "%", "x%"):
        with pytest.raises(CommandError, match=r"^x: expected 0% to less than 100%"):
            parse_share("x", text, 1000)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_attention_heads": None}, "the key num_attention_heads is missing"),
        ({"num_hidden_layers": None}, "the key num_hidden_layers is missing"),
        ({"hidden_size": None}, "the key hidden_size is missing"),
        ({"hidden_size": 4097}, "hidden_size (4097) is not a multiple of num_attention_heads"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers should be a positive integer, is '32'"),
        ({"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads (5)"),
        ({"num_attention_heads": 256, "num_key_value_heads": 1}, "more than 128 query heads"),
        ({"kv_lora_rank": 512}, "latent attention (MLA) are not supported (kv_lora_rank is 512)"),
        ({"is_encoder_decoder": True}, "encoder-decoder models are not supported"),
        ({"full_attention_interval": 4}, "layers without attention are not supported"),
        ({"v_head_dim": 64}, "several head dimensions are not supported"),
        ({"num_kv_shared_layers": 32}, "should be less than num_hidden_layers (32)"),
        ({"layer_types": ["full_attention"]}, "layer_types should be a list"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of the type 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 32}, "the key sliding_window is missing"),
        ({"vocab_size": None}, "give --weights: config.json: the key vocab_size is missing"),
    ],
)
def test_configs_that_are_refused(tq_error, config_file, changes, says):
    assert says in tq_error("plan", config_file(**changes), "--memory", "80GB")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--memory 80", "--memory: expected a size such as 80GB"),
        ("--memory 80GB --weights big", "--weights: expected a size such as 80GB"),
        ("--memory 80GB --reserve 100%", "--reserve: expected 0% to less than 100%"),
        ("--memory 8GB", "nothing is left for the cache: the memory is 8.00 GB"),
    ],
)
def test_sizes_that_are_refused(tq_error, config_file, arguments, says):
    assert says in tq_error("plan", config_file(), *arguments.split())


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("", "one of the arguments --memory --device is required"),
        ("--memory 1GB --device", "not allowed with argument --memory"),
        ("--memory 1GB --weights 1GB --weight-bits 4", "not allowed with argument --weights"),
        ("--memory 1GB --batch 0", "expected a positive integer, got '0'"),
        ("--memory 1GB --length x", "expected a positive integer, got 'x'"),
    ],
)
def test_arguments_that_are_refused(config_file, capsys, arguments, says):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(config_file()), *arguments.split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tq plan: ")
    assert says in line


@pytest.mark.parametrize("content, says", [("{", "not a JSON file"), ("[]", "expected a JSON obj")])
def test_files_that_are_no_config(tq_error, tmp_path, content, says):
    file = tmp_path / "config.json"
    file.write_text(content)
    assert says in tq_error("plan", file, "--memory", "80GB")


def test_a_folder_without_a_config(tq_error, tmp_path):
    line = tq_error("plan", tmp_path, "--memory", "80GB")
    assert line.endswith("config.json: No such file or directory")


# --- presets that are not supported -----------------------------------------------------------


def test_a_head_dim_without_kernels(tq, config_file):
    file = config_file(head_dim=100)
    row = rows(plan_json(tq, file, "--memory", "80GB"))["4bit"]
    assert row["bytes_per_token"] == 32 * 8 * 106
    assert len(row["reasons"]) == 1
    text = tq("plan", file, "--memory", "80GB")
    reason = "not with kernels: the kernels need a head_dim that is a multiple of 8, not 100"
    assert f"{', '.join(PRESETS)}: {reason}" in text


def test_a_head_dim_without_a_format(tq, config_file):
    file = config_file(head_dim=640)
    by_name = rows(plan_json(tq, file, "--memory", "80GB"))
    assert by_name["16 bit"]["tokens"]
    assert by_name["4bit"]["tokens"] is None
    text = tq("plan", file, "--memory", "80GB")
    assert "not supported: head_dim: expected 8 to 576, got 640" in text


# --- output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("--batch", "8", "--length", "5000")])
def test_text_and_json_say_the_same(tq, config_file, extra):
    file = config_file(GEMMA)
    result = plan_json(tq, file, "--memory", "80GB", *extra)
    text = tq("plan", file, "--memory", "80GB", *extra)
    for row in result["presets"]:
        names = ["bytes_per_token", "tokens", *(["each"] if extra else []), "sequences"]
        sizes = [f"{row[name]:,}" for name in names]
        sizes.insert(1, f"{row['ratio']:.2f}x")
        pattern = rf"^{row['preset']} +{' +'.join(map(re.escape, sizes))}$"
        assert re.search(pattern, text, re.MULTILINE), pattern
    for name in ("memory", "reserve", "weights", "cache"):
        assert re.search(rf"^{name} +{result[name] / 1e9:.2f} GB", text, re.MULTILINE)


def test_the_page_shows_what_is_printed(tq, config_file):
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")
    llama = tq("plan", config_file(), "--memory", "80GB")
    assert llama in page
    gemma = tq(*f"plan {config_file(GEMMA)} --memory 80GB --batch 16 --length 32768".split())
    assert gemma in page
