"""``tq eval``: perplexity, KL divergence and pass keys over a packed cache."""

from __future__ import annotations

import argparse
import csv
import inspect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tq_cli.errors import CommandError
from tq_cli.language_model import (
    LanguageModel,
    add_model_arguments,
    load,
    positive,
    progress,
    read_tokens,
)
from tq_cli.table import table
from tq_core import PRESETS, CacheLayout, QuantConfig, calibration
from tq_core.codec import Codec, load_codecs

DESCRIPTION = """\
Run a model over packed caches and over an uncompressed one, and compare: perplexity,
KL divergence of the next-token distributions and top-1 agreement on a text, and how
many tokens of a pass key are found in it. Every token attends to the packed cache.

  tq eval --model path/to/model --text some.txt --presets 4bit 3bit
  tq eval --model path/to/model --text some.txt --codecs codecs.safetensors --csv out.csv"""
BASELINE = "16 bit"
#: The name of a file's own formats.
OWN = "file"
TASKS = ("text", "passkey")
COLUMNS = {
    "cache": "cache",
    "bits": "bits",
    "perplexity": "perplexity",
    "change": "change",
    "divergence": "KL",
    "agreement": "top-1",
    "key_tokens": "pass key",
    "key_nll": "nll a token",
}
_QUESTION = "\n\nWhat is the pass key? The pass key is"
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``tq eval``."""
    add_model_arguments(parser)
    parser.add_argument(
        "--presets", nargs="+", metavar="NAME", help="formats to compare (default: all)"
    )
    parser.add_argument(
        "--codecs",
        metavar="FILE",
        type=Path,
        help="a file of tq calibrate: its own formats, and its transforms under every preset, "
        "are measured beside the plain presets",
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=positive, default=2048, help="of text (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", metavar="N", type=positive, default=512, help="a step (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=positive,
        default=1,
        help="rotations to average over (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        metavar="N",
        type=positive,
        default=[1024, 2048],
        help="tokens before the question for the pass key (default: 1024 2048)",
    )
    parser.add_argument(
        "--depths",
        nargs="+",
        metavar="D",
        type=float,
        default=[0.1, 0.5, 0.9],
        help="where the pass key stands, 0 to 1 (default: 0.1 0.5 0.9)",
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the rows into this file (needs matplotlib)"
    )


@dataclass
class Row:
    """A cache and what it did.

    Attributes:
        name: of the preset, or ``OWN``; calibrated ones have a suffix.
        codecs: of each seed, a codec a layer; None for the uncompressed cache.
        bits: a coordinate, metadata included.
        nll, divergence, agreement: sums over tokens, of each seed.
        keys: of each length and depth: tokens right, of how many, and their nll.
    """

    name: str
    codecs: list[list[Codec]] | None
    bits: float
    nll: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    keys: dict[tuple[int, float], list[float]] = field(default_factory=dict)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All that ``tq eval`` prints.

    Raises:
        CommandError: model, text, presets or codecs cannot be used.
    """
    names = args.presets or list(PRESETS)
    for name in names:
        try:
            QuantConfig.preset(name)
        except ValueError as error:
            raise CommandError(f"--presets: {error}") from None
    if not all(0 <= depth <= 1 for depth in args.depths):
        raise CommandError(f"--depths: expected numbers from 0 to 1, got {args.depths}")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise CommandError(
            "--plot: needs matplotlib, which is not installed: pip install matplotlib"
        )
    for option, file in (("--csv", args.csv), ("--plot", args.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{option}: {file.absolute().parent} is not a folder")
    language = load(args)
    import_module("tq_torch.hf")
    rows = _rows(args, language, names)
    ids = read_tokens(language, args.text)
    if len(ids) < 2:
        raise CommandError(f"--text: expected at least 2 tokens, got {len(ids)}")
    try:
        if "text" in args.tasks:
            _score_text(args, language, rows, ids[: args.tokens])
        if "passkey" in args.tasks:
            _score_keys(args, language, rows, ids)
    except ValueError as error:
        raise CommandError(f"the model cannot be evaluated: {error}") from error
    result = _result(args, language, rows, min(len(ids), args.tokens))
    if args.csv is not None:
        _write_csv(args.csv, result)
    if args.plot is not None:
        _draw(args.plot, result)
    return result


def _rows(args: argparse.Namespace, language: LanguageModel, names: Sequence[str]) -> list[Row]:
    rows = [Row(BASELINE, None, 16.0)]
    dim, seeds = language.head_dim, range(args.seeds)
    for name in names:
        config = QuantConfig.preset(name)
        codecs = [[Codec(config, dim, seed=s)] * language.num_layers for s in seeds]
        rows.append(Row(name, codecs, _bits(language, codecs[0])))
    if args.codecs is None:
        return rows
    try:
        file = load_codecs(
            args.codecs,
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=dim,
        )
    except FileNotFoundError:
        raise CommandError(f"--codecs: {args.codecs} does not exist") from None
    except (OSError, ImportError, ValueError) as error:
        raise CommandError(f"--codecs: {error}") from error
    own = [codec.config for codec in file.codecs]
    for title, configs in [
        *((f"{name}, calibrated", [QuantConfig.preset(name)] * len(own)) for name in names),
        (OWN, own),
    ]:
        # Seed 0 of a file is the rotation that it holds.
        codecs = [
            [
                calibration.recode(codec, config, s or None)
                for codec, config in zip(file.codecs, configs, strict=True)
            ]
            for s in seeds
        ]
        rows.append(Row(title, codecs, _bits(language, codecs[0])))
    return rows


def _bits(language: LanguageModel, codecs: Sequence[Codec]) -> float:
    sizes = [
        CacheLayout(c.config, language.num_kv_heads, language.head_dim, 16).slot_bytes
        for c in codecs
    ]
    return sum(sizes) / len(sizes) * 8 / (2 * language.head_dim)


class _Run:
    """A sequence that goes through a model chunk by chunk, over one cache."""

    def __init__(self, language: LanguageModel, codecs: list[Codec] | None, length: int) -> None:
        self.torch: Any = import_module("torch")
        self.model = language.model
        # Its name from some version on; the older one then warns.
        parameters = inspect.signature(self.model.forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"
        if codecs is None:
            cache: Any = import_module("transformers").DynamicCache
            self.cache, self.attention = cache(config=self.model.config), "sdpa"
        else:
            hf: Any = import_module("tq_torch.hf")
            self.cache = hf.TurboQuantCache(
                config=self.model.config, preset=codecs, num_tokens=length
            )
            self.attention = "turboquant"

    def __call__(self, ids: Sequence[int]) -> Any:
        """Log-probabilities ``[T, V]`` after each of the next tokens."""
        self.model.set_attn_implementation(self.attention)
        tokens = self.torch.tensor([list(ids)], device=next(self.model.parameters()).device)
        with self.torch.inference_mode():
            logits = self.model(tokens, use_cache=True, **{self.argument: self.cache}).logits
        return logits[0].float().log_softmax(-1)


def _score_text(
    args: argparse.Namespace, language: LanguageModel, rows: list[Row], ids: Sequence[int]
) -> None:
    """Perplexity, divergence and agreement; all caches go through the text side by side."""
    torch: Any = import_module("torch")
    runs = [
        (row, seed, _Run(language, None if row.codecs is None else row.codecs[seed], len(ids)))
        for row in rows
        for seed in range(1 if row.codecs is None else args.seeds)
    ]
    for row, _, _ in runs:
        for sums in (row.nll, row.divergence, row.agreement):
            sums.append(0.0)
    with progress(len(ids) * len(runs), "text") as update:
        for start in range(0, len(ids) - 1, args.chunk):
            part = ids[start : start + args.chunk]
            targets = torch.tensor(ids[start + 1 : start + 1 + len(part)])
            exact = None
            for row, seed, step in runs:
                found = step(part)[: len(targets)]
                if exact is None:
                    exact = found
                wanted = targets.to(found.device)[:, None]
                row.nll[seed] -= float(found.gather(1, wanted).double().sum())
                row.divergence[seed] += float((exact.exp() * (exact - found)).double().sum())
                row.agreement[seed] += float((exact.argmax(-1) == found.argmax(-1)).sum())
                update(len(part))
    for row in rows:
        for sums in (row.nll, row.divergence, row.agreement):
            sums[:] = [total / (len(ids) - 1) for total in sums]


def _score_keys(
    args: argparse.Namespace, language: LanguageModel, rows: list[Row], ids: Sequence[int]
) -> None:
    """How well a number is found that stands somewhere in the text; the answer is forced."""
    torch: Any = import_module("torch")

    def encode(text: str) -> list[int]:
        return list(language.tokenizer(text, add_special_tokens=False)["input_ids"])

    cases = []
    question = encode(_QUESTION)
    for number, length in enumerate(args.lengths):
        for place, depth in enumerate(args.depths):
            key = str(10000 + (7919 * (1 + place + len(args.depths) * number) ** 2) % 90000)
            needle, answer = encode(_NEEDLE.format(key=key)), encode(" " + key)
            # A space before the number is the same for every key.
            space = encode(" ")
            given = len(space) if answer[: len(space)] == space else 0
            filler = length - len(needle) - len(question)
            if filler < 1 or len(ids) < filler:
                raise CommandError(
                    f"--lengths: {length} tokens need a text of {max(filler, 1)} tokens and more "
                    f"than {len(needle) + len(question)}, the text has {len(ids)}"
                )
            at = round(depth * filler)
            prompt = [*ids[:at], *needle, *ids[at:filler], *question]
            cases.append(((length, depth), prompt, answer, given))
    total = sum(len(prompt) for _, prompt, _, _ in cases)
    seeds = sum(1 if row.codecs is None else args.seeds for row in rows)
    with progress(total * seeds, "pass key") as update:
        for where, prompt, answer, given in cases:
            for row in rows:
                every: Sequence[list[Codec] | None] = row.codecs or [None]
                for codecs in every:
                    step = _Run(language, codecs, len(prompt) + len(answer))
                    whole = [*prompt, *answer[:-1]]
                    found: Any = None
                    for start in range(0, len(whole), args.chunk):
                        now = step(whole[start : start + args.chunk])
                        found = now if found is None else torch.cat([found, now])[-len(answer) :]
                        update(min(args.chunk, max(len(prompt) - start, 0)))
                    last = found[-len(answer) :][given:].cpu()
                    wanted = torch.tensor(answer[given:])
                    right = float((last.argmax(-1) == wanted).sum())
                    nll = -float(last.gather(1, wanted[:, None]).sum())
                    sums = row.keys.setdefault(where, [0.0, 0.0, 0.0])
                    for index, value in enumerate((right, len(wanted), nll)):
                        sums[index] += value


def _result(
    args: argparse.Namespace, language: LanguageModel, rows: list[Row], tokens: int
) -> dict[str, Any]:
    base = math.exp(rows[0].nll[0]) if rows[0].nll else None
    found = []
    for row in rows:
        one: dict[str, Any] = {"cache": row.name, "bits": row.bits}
        if base is not None:
            each = [math.exp(nll) for nll in row.nll]
            one["perplexity"] = statistics.fmean(each)
            one["change"] = one["perplexity"] / base - 1
            one["divergence"] = statistics.fmean(row.divergence)
            one["agreement"] = statistics.fmean(row.agreement)
            one["perplexities"] = each
        if row.keys:
            right, count, nll = (sum(sums[i] for sums in row.keys.values()) for i in range(3))
            one["key_tokens"], one["key_of"], one["key_nll"] = right, count, nll / count
            one["keys"] = [
                {"length": length, "depth": depth, "right": sums[0], "of": sums[1]}
                for (length, depth), sums in row.keys.items()
            ]
        found.append(one)
    return {
        "model": language.name,
        "text": [str(file) for file in args.text],
        "tokens": tokens,
        "seeds": args.seeds,
        "lengths": args.lengths,
        "depths": args.depths,
        "caches": found,
    }


def _cells(one: dict[str, Any], columns: Sequence[str]) -> list[str]:
    baseline = one["cache"] == BASELINE
    shown = {
        "cache": one["cache"],
        "bits": f"{one['bits']:.2f}",
        "perplexity": f"{one.get('perplexity', 0):.2f}",
        "change": "" if baseline else f"{one.get('change', 0):+.2%}",
        "divergence": "" if baseline else f"{one.get('divergence', 0):.5f}",
        "agreement": "" if baseline else f"{one.get('agreement', 0):.1%}",
        "key_tokens": f"{one.get('key_tokens', 0):.0f} of {one.get('key_of', 0):.0f}",
        "key_nll": f"{one.get('key_nll', 0):.3f}",
    }
    return [shown[name] for name in columns]


def text(result: dict[str, Any]) -> str:
    """The result as lines."""
    caches = result["caches"]
    columns = [name for name in COLUMNS if name in caches[0]]
    rows = [[COLUMNS[name] for name in columns], *(_cells(one, columns) for one in caches)]
    lines = [
        f"{result['model']}: {result['tokens']:,} tokens of {', '.join(result['text'])}, "
        f"mean of {result['seeds']} rotation(s)",
        "",
        *table(rows),
    ]
    if "keys" in caches[0]:
        places = caches[0]["keys"]
        head = ["pass key", *(f"{p['length']} at {p['depth']:.0%}" for p in places)]
        by_place = [
            [one["cache"], *(f"{p['right']:.0f}/{p['of']:.0f}" for p in one["keys"])]
            for one in caches
        ]
        lines += ["", *table([head, *by_place])]
    return "\n".join(lines)


def _write_csv(path: Path, result: dict[str, Any]) -> None:
    columns = [name for name in (*COLUMNS, "key_of") if name in result["caches"][0]]
    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["model", "tokens", "seeds", *columns])
            for one in result["caches"]:
                values = [one[name] for name in columns]
                writer.writerow([result["model"], result["tokens"], result["seeds"], *values])
    except OSError as error:
        raise CommandError(f"--csv: {path}: {error.strerror or error}") from None


def _draw(path: Path, result: dict[str, Any]) -> None:
    """Perplexity or, without it, the pass key's nll, against the bits of a coordinate."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    name = "perplexity" if "perplexity" in result["caches"][0] else "key_nll"
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    groups: dict[str, list[dict[str, Any]]] = {"plain": [], "calibrated": [], OWN: []}
    for one in result["caches"][1:]:
        suffix = "calibrated" if one["cache"].endswith(", calibrated") else "plain"
        groups[OWN if one["cache"] == OWN else suffix].append(one)
    for (label, ones), mark in zip(groups.items(), ("o", "s", "*"), strict=True):
        if ones:
            axes.plot([o["bits"] for o in ones], [o[name] for o in ones], mark, label=label)
        for one in ones:
            words = one["cache"].removesuffix(", calibrated")
            point = one["bits"], one[name]
            axes.annotate(words, point, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.axhline(result["caches"][0][name], color="gray", linewidth=1, label=BASELINE)
    axes.set_xlabel("bits a coordinate, metadata included")
    axes.set_ylabel(COLUMNS[name])
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise CommandError(f"--plot: {path}: {error}") from None
    pyplot.close(figure)
