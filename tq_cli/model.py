"""What a Hugging Face ``config.json`` says about the cache and the weights of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tq_cli.errors import CommandError
from tq_core.validation import MAX_GROUP

#: Every how many layers one sees all tokens, where the file leaves it to the code of the model.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
#: Families that share the embedding with the output where the file says nothing.
_TIED = ("gemma", "cohere")
#: Keys of models whose cache is not pages of keys and values of one size.
_REFUSED = {
    "kv_lora_rank": "models with latent attention (MLA) are not supported",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "attention_chunk_size": "models with chunked attention are not supported",
    "block_configs": "models whose layers have different sizes are not supported",
    **dict.fromkeys(
        (
            "attn_layer_indices",
            "attn_layer_period",
            "full_attention_interval",
            "hybrid_override_pattern",
        ),
        "models that have layers without attention are not supported",
    ),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a model that a plan needs.

    Attributes:
        model_type: its name in transformers, or ``"?"``.
        full_layers: layers whose cache keeps all tokens.
        window_layers: layers whose cache needs a window's tokens alone.
        window: that window in tokens, 0 where no layer has one.
        num_kv_heads: Hk of every layer.
        head_dim: D of keys and values.
        parameters: estimated number of parameters, or None with ``missing`` saying why.
        missing: the key without which there is no estimate.
        has_vision: there are parts besides the text model, which ``parameters`` leaves out.
    """

    model_type: str
    full_layers: int
    window_layers: int
    window: int
    num_kv_heads: int
    head_dim: int
    parameters: int | None
    missing: str | None
    has_vision: bool

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        return self.full_layers + self.window_layers


class _Keys:
    """The keys of a file, checked as they are read."""

    def __init__(self, keys: dict[str, Any], where: str, model_type: str) -> None:
        self.keys, self.where, self.model_type = keys, where, model_type

    def get(self, name: str) -> Any:
        return self.keys.get(name)

    def optional(self, name: str) -> int | None:
        """A positive integer, or None where the file has none."""
        value = self.keys.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CommandError(f"{self.where}: {name} should be a positive integer, is {value!r}")
        return value

    def count(self, name: str) -> int:
        """An integer that may be 0, which it is where the file has none."""
        return (self.optional(name) or 0) if self.keys.get(name) else 0

    def required(self, name: str) -> int:
        value = self.optional(name)
        if value is None:
            raise CommandError(f"{self.where}: the key {name} is missing")
        return value


def config_path(path: Path) -> Path:
    """The file itself, or the ``config.json`` of a folder."""
    return path / "config.json" if path.is_dir() else path


def read_model(path: Path) -> Model:
    """The sizes in the ``config.json`` at ``path``, a file or a folder that holds one.

    Raises:
        CommandError: it cannot be read, lacks a key, or is of a model that is not supported.
    """
    return parse_model(_load(config_path(path)), config_path(path).name)


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{file}: not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise CommandError(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def parse_model(config: dict[str, Any], where: str = "config.json") -> Model:
    """The sizes in a parsed ``config.json``; ``where`` names it in errors."""
    nested = config.get("text_config")
    own = nested if isinstance(nested, dict) else config
    where += ": text_config" if own is nested else ""
    model_type = str(own.get("model_type") or config.get("model_type") or "?")
    keys = _Keys(own, where, model_type)
    for name, reason in _REFUSED.items():
        if keys.get(name):
            raise CommandError(f"{where}: {reason} ({name} is {keys.get(name)!r})")
    heads = keys.required("num_attention_heads")
    kv_heads = keys.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CommandError(
            f"{where}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads "
            f"({kv_heads})"
        )
    if heads // kv_heads > MAX_GROUP:
        raise CommandError(
            f"{where}: more than {MAX_GROUP} query heads a KV head are not supported (there are "
            f"{heads // kv_heads})"
        )
    head_dim = _head_dim(keys, heads)
    for name in ("v_head_dim", "global_head_dim"):
        if keys.optional(name) not in (None, head_dim):
            raise CommandError(
                f"{where}: models with several head dimensions are not supported "
                f"(head_dim is {head_dim}, {name} is {keys.get(name)})"
            )
    windowed = _windowed(keys)
    try:
        parameters, missing = _parameters(keys, config, heads, kv_heads, head_dim), None
    except CommandError as error:
        parameters, missing = None, str(error)
    return Model(
        model_type=model_type,
        full_layers=windowed.count(False),
        window_layers=windowed.count(True),
        window=keys.required("sliding_window") if any(windowed) else 0,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        parameters=parameters,
        missing=missing,
        has_vision="vision_config" in config or "audio_config" in config,
    )


def _head_dim(keys: _Keys, heads: int) -> int:
    given = keys.optional("head_dim")
    if given is not None:
        return given
    hidden = keys.required("hidden_size")
    if hidden % heads:
        raise CommandError(
            f"{keys.where}: there is no head_dim, and hidden_size ({hidden}) is not a multiple of "
            f"num_attention_heads ({heads})"
        )
    return hidden // heads


def _windowed(keys: _Keys) -> list[bool]:
    """Whether each layer that has a cache of its own has a sliding window."""
    layers = keys.required("num_hidden_layers")
    # The last layers of such models read the cache of earlier ones.
    own = layers - keys.count("num_kv_shared_layers")
    if own < 1:
        raise CommandError(
            f"{keys.where}: num_kv_shared_layers should be less than num_hidden_layers ({layers})"
        )
    types = keys.get("layer_types")
    if types is not None:
        return _of_types(keys, types, layers)[:own]
    window = keys.optional("sliding_window")
    if window is None or keys.get("use_sliding_window") is False:
        return [False] * own
    if keys.get("use_sliding_window"):
        first = keys.required("max_window_layers")
        return [layer >= first for layer in range(own)]
    pattern = keys.optional("sliding_window_pattern")
    pattern = pattern or _PATTERNS.get(keys.model_type)
    return [pattern is None or bool((layer + 1) % pattern) for layer in range(own)]


def _of_types(keys: _Keys, types: Any, layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != layers:
        raise CommandError(
            f"{keys.where}: layer_types should be a list of num_hidden_layers ({layers}) names"
        )
    known = ("full_attention", "sliding_attention")
    for name in types:
        if name not in known:
            raise CommandError(
                f"{keys.where}: layers of the type {name!r} are not supported, only "
                + " and ".join(known)
            )
    return [name == "sliding_attention" for name in types]


def _parameters(
    keys: _Keys, config: dict[str, Any], heads: int, kv_heads: int, head_dim: int
) -> int:
    """Parameters of a decoder with gated MLPs, dense or of experts."""
    hidden, layers = keys.required("hidden_size"), keys.required("num_hidden_layers")
    vocabulary = keys.required("vocab_size")
    tied = keys.get("tie_word_embeddings")
    if tied is None:
        tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = keys.model_type.startswith(_TIED)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    norms = 2 * hidden
    layer = attention + _mlp(keys, hidden) + norms
    return vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden


def _mlp(keys: _Keys, hidden: int) -> int:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = keys.count(name)
        if experts:
            width = keys.optional("moe_intermediate_size") or keys.required("intermediate_size")
            shared = keys.count("shared_expert_intermediate_size")
            return experts * (3 * hidden * width + hidden) + 3 * hidden * shared
    return 3 * hidden * keys.required("intermediate_size")


def stored_weights(folder: Path) -> int | None:
    """Bytes of the ``*.safetensors`` in ``folder``; None where there are none, or not all.

    Some repositories hold the weights twice, so the files that the index names are counted, or
    ``model.safetensors``, or else all.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _load(index).get("weight_map")
        found = set(names.values()) if isinstance(names, dict) else set()
        files = [folder / str(name) for name in found]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)
