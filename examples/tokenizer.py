"""Text to token ids and back, with the ``tokenizers`` package alone; a model with its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from examples.weights import LlamaWeights, ModelUnavailable, UnsupportedModel, load_model

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of tokens such as <|im_start|>


def load_or_exit(model: str | Path | None) -> tuple[LlamaWeights, Any, Path]:
    """Weights, tokenizer and path for a command, or its end: the reason on stderr, exit code 2."""
    try:
        weights, path = load_model(model)
        return weights, load_tokenizer(path), path
    except (ModelUnavailable, UnsupportedModel) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def load_tokenizer(model: str | Path):
    """The ``tokenizers.Tokenizer`` of a transformers directory or of a GGUF file."""
    from tokenizers import Tokenizer

    model = Path(model)
    if not model.is_dir():
        return _from_gguf(model)
    if not (model / "tokenizer.json").is_file():
        raise UnsupportedModel(f"{model} holds no tokenizer.json")
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def _from_gguf(path: Path):
    """Byte-level BPE with the splitting rule of SmolLM: every digit alone, then GPT-2's pattern."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields

    def read(name: str):
        return fields[f"tokenizer.ggml.{name}"].contents()

    kind = (read("model"), read("pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModel(
            f"{path} has tokenizer {kind}; from a GGUF file only ('gpt2', 'smollm') is supported. "
            "Use the model's transformers directory, which has a tokenizer.json"
        )
    tokens = read("tokens")
    merges = [tuple(merge.split(" ")) for merge in read("merges")]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, read("token_type"), strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def encode(tokenizer, text: str, bos_id: int | None = None) -> list[int]:
    """Token ids of ``text``, after ``bos_id`` when the model wants one."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if bos_id is None else [bos_id, *ids]
