"""Configs of the tests of ``tq``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tq_cli.main import main

#: The sizes of Llama-3.1-8B.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config with some keys changed (None removes one); returns its path."""

    def write(base: dict[str, Any] = LLAMA, **changes: Any) -> Path:
        keys = {k: v for k, v in {**base, **changes}.items() if v is not None}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(keys), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tq(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``tq`` in this process; returns what it prints."""

    def run(*arguments: object) -> str:
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def tq_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``tq`` in this process, which has to fail; returns the one line on stderr."""

    def run(*arguments: object) -> str:
        assert main([str(a) for a in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        return line

    return run
