"""Loading a model and text for the commands that run one, and their progress bars."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tq_cli.errors import CommandError
from tq_cli.machine import sentence

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LanguageModel:
    """A model of transformers and what it reads text with.

    Attributes:
        model: in evaluation mode, on its device.
        tokenizer: its tokenizer.
        name: the last part of its path.
        num_layers, num_kv_heads, head_dim: sizes of its cache.
    """

    model: Any
    tokenizer: Any
    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``--model`` and where it runs."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        required=True,
        help="a directory or a .gguf file that transformers loads; nothing is downloaded",
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, nargs="+", required=True, help="UTF-8 text files"
    )
    parser.add_argument("--device", help="a device of torch (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the model (default: float32 on a CPU, bfloat16 elsewhere)",
    )


def positive(text: str) -> int:
    """The type of an argument: a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def load(args: argparse.Namespace) -> LanguageModel:
    """The model of ``--model``.

    Raises:
        CommandError: a package is missing, or the model cannot be loaded.
    """
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise CommandError(f"needs {package}, which is not installed: pip install {package}")
    path: Path = args.model
    if not path.exists():
        raise CommandError(f"--model: {path} does not exist")
    torch, transformers = import_module("torch"), import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    place: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.is_file():
        if path.suffix != ".gguf":
            raise CommandError(f"--model: expected a directory or a .gguf file, got {path}")
        folder, place["gguf_file"] = path.parent, path.name
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **place)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, name), **place
            )
        model = model.to(device).eval()
    except Exception as error:
        raise CommandError(f"--model: {path} cannot be loaded: {sentence(error)}") from error
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return LanguageModel(
        model,
        tokenizer,
        path.name,
        text.num_hidden_layers,
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def read_tokens(language: LanguageModel, files: Sequence[Path]) -> list[int]:
    """Token ids of the files, one after the other.

    Raises:
        CommandError: a file cannot be read.
    """
    ids: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--text: {file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise CommandError(f"--text: {file} is not UTF-8 text") from None
        ids += language.tokenizer(text, verbose=False)["input_ids"]
    return ids


@contextmanager
def progress(total: int, title: str, unit: str = "tok") -> Iterator[Callable[[int], object]]:
    """A bar on stderr where that is a terminal and tqdm is installed; called with what is done."""
    if find_spec("tqdm") is None:
        yield lambda count: None
        return
    tqdm: Any = import_module("tqdm").tqdm
    # None: no bar where stderr is not a terminal.
    with tqdm(total=total, desc=title, unit=unit, disable=None, leave=False) as bar:
        yield bar.update
