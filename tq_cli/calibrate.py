"""``tq calibrate``: a file of codecs for a model, from its own keys, queries and values."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from importlib import import_module
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
from tq_core.calibration import Choice
from tq_core.codec import Codec, save_codecs

DESCRIPTION = """\
Measure the keys, queries and values of a model on some text and write a file with
a codec for each layer: offsets, transforms, and formats under a budget of bits.
The model writes text of its own too, so that the codecs serve text of other kinds.
A quarter of all is held out: it decides what is used and how much is trusted.

  tq calibrate --model path/to/model --text some.txt --out codecs.safetensors
  tq calibrate --model model.gguf --text prose.txt code.py --bits 3.4"""
KEY_FORMATS = ("mse2", "mse3", "mse4", "fp8")
VALUE_FORMATS = ("mse2", "mse3", "mse4", "int8")
#: Tokens of a text that the model writes, and how many of these it writes at a time.
OWN_LENGTH, OWN_BATCH = 512, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``tq calibrate``."""
    add_model_arguments(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("codecs.safetensors"),
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=positive,
        default=8192,
        help="to read, an equal share of each file (default: %(default)s)",
    )
    parser.add_argument(
        "--own-tokens",
        metavar="N",
        type=_not_negative,
        default=8192,
        help="that the model writes itself and reads too, for what the text does not show; 0 "
        "turns it off (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        metavar="N",
        type=positive,
        default=2048,
        help="tokens of a text of its own, at most a quarter of all (default: %(default)s)",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        "--bits",
        metavar="B",
        type=float,
        help="mean bits a coordinate, metadata included, that the layers share by what each was "
        "measured to need (default: 4.4)",
    )
    formats.add_argument("--preset", choices=PRESETS, help="one format for all layers")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the rotations (default: %(default)s)"
    )


def _not_negative(text: str) -> int:
    return 0 if text == "0" else positive(text)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrates, writes the file and returns the report.

    Raises:
        CommandError: the model or the text cannot be used, or the budget is too small.
    """
    if args.seed < 0:
        raise CommandError(f"--seed: expected at least 0, got {args.seed}")
    if not args.out.absolute().parent.is_dir():
        raise CommandError(f"--out: {args.out.absolute().parent} is not a folder")
    language = load(args)
    torch, module = import_module("torch"), import_module("tq_torch.calibrate")
    share = -(-args.tokens // len(args.text))
    ids = [token for file in args.text for token in read_tokens(language, [file])[:share]]
    size = min(args.window, len(ids) // 4)
    windows = [torch.tensor(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size or 1)]
    calibrator = module.Calibrator(language.model)
    try:
        own = _own(args, calibrator) if windows else []
        with progress(2 * sum(map(len, [*windows, *own])), "moments") as update:
            # The last of each kind is held out, at least.
            found = calibrator.fit([*own, *windows], seed=args.seed, progress=update)
    except ValueError as error:
        raise CommandError(str(error)) from error
    choices = _choices(language, found)
    chosen = _choose(args, language, choices)
    final = [
        layer.fit.codec(choice.config, language.head_dim, args.seed)
        for layer, choice in zip(found, chosen, strict=True)
    ]
    with progress(2 * len(windows[-1]), "check") as update:
        check = calibrator.check(windows[-1], final, progress=update)
    report = _report(args, language, len(ids), sum(map(len, own)), found, check, chosen)
    _save(args.out, final, language, report)
    return report


def _own(args: argparse.Namespace, calibrator: Any) -> list[Any]:
    """Windows that the model writes, as many as fill four equal ones at least."""
    count = max(4, -(-args.own_tokens // OWN_LENGTH)) if args.own_tokens else 0
    if not count:
        return []
    length = max(2, min(OWN_LENGTH, args.own_tokens // count))
    own: list[Any] = []
    with progress(count * (length - 1), "own text") as update:
        for start in range(0, count, OWN_BATCH):
            batch = min(OWN_BATCH, count - start)
            own += calibrator.sample(batch, length, seed=args.seed + start, progress=update)
    return own


def _choices(language: LanguageModel, found: list[Any]) -> list[list[Choice]]:
    """Formats of each layer, with the KL divergence that each is expected to cost."""
    configs = [QuantConfig(key=key, value=value) for key in KEY_FORMATS for value in VALUE_FORMATS]
    # Presets with affine values are not better, but may be asked for by name.
    configs += [QuantConfig.preset(name) for name in PRESETS]
    return [
        [_choice(language, config, layer) for config in dict.fromkeys(configs)] for layer in found
    ]


def _choice(language: LanguageModel, config: QuantConfig, layer: Any) -> Choice:
    dim = language.head_dim
    layout = CacheLayout(config, language.num_kv_heads, dim, 16)
    cost = layer.key_divergence * calibration.noise(config.key, dim)
    cost += layer.value_divergence * calibration.noise(config.value, dim)
    return Choice(config, layout.slot_bytes, cost)


def _choose(
    args: argparse.Namespace, language: LanguageModel, choices: list[list[Choice]]
) -> list[Choice]:
    if args.preset is not None:
        config = QuantConfig.preset(args.preset)
        return [next(c for c in layer if c.config == config) for layer in choices]
    bits = 4.4 if args.bits is None else args.bits
    per_coordinate = 2 * language.head_dim / 8
    try:
        if not math.isfinite(bits):
            raise ValueError(f"expected a number, got {bits}")
        return calibration.allocate(choices, bits * per_coordinate)
    except ValueError:
        least = max(min(c.size for c in layer) for layer in choices) / per_coordinate
        raise CommandError(
            f"--bits: expected at least {least:.3g} for head_dim {language.head_dim}, got {bits}"
        ) from None


def _report(
    args: argparse.Namespace,
    language: LanguageModel,
    tokens: int,
    own_tokens: int,
    found: list[Any],
    check: Any,
    chosen: list[Choice],
) -> dict[str, Any]:
    names = {QuantConfig.preset(name): name for name in PRESETS}
    dim = language.head_dim
    layers = []
    for number, (layer, choice) in enumerate(zip(found, chosen, strict=True)):
        key, value = (calibration.noise(f, dim) for f in (choice.config.key, choice.config.value))
        sides = {}
        for side, fit in (("key", layer.fit.key), ("value", layer.fit.value)):
            sides[side] = {
                "mean_energy": fit.mean_energy,
                "outliers": fit.outliers,
                "offset": fit.offset is not None,
                "transform": fit.transform is not None,
                "shrinkage": fit.shrinkage,
                "gain": fit.gain,
            }
        layers.append(
            {
                "layer": number,
                **sides,
                "score_error": {
                    "plain": math.sqrt(key * layer.plain_score_error),
                    "predicted": math.sqrt(key * layer.score_error),
                    "measured": check.score_errors[number],
                },
                "divergence": {
                    "plain": key * layer.plain_key_divergence
                    + value * layer.plain_value_divergence,
                    "keys": key * layer.key_divergence,
                    "values": value * layer.value_divergence,
                },
                "preset": names.get(choice.config),
                "config": asdict(choice.config),
                "bytes": choice.size,
            }
        )
    return {
        "out": str(args.out),
        "model": language.name,
        "tokens": tokens,
        "own_tokens": own_tokens,
        "bits": sum(c.size for c in chosen) / len(chosen) * 8 / (2 * dim),
        "expected_divergence": sum(c.cost for c in chosen),
        "measured_divergence": check.divergence,
        "layers": layers,
    }


def _save(path: Path, codecs: list[Codec], language: LanguageModel, report: dict[str, Any]) -> None:
    model = {
        "name": language.name,
        "num_layers": str(language.num_layers),
        "num_kv_heads": str(language.num_kv_heads),
        "head_dim": str(language.head_dim),
    }
    kept = {name: value for name, value in report.items() if name != "out"}
    try:
        save_codecs(path, codecs, model, kept)
    except (OSError, ImportError) as error:
        raise CommandError(f"--out: {path}: {error}") from error


def text(result: dict[str, Any]) -> str:
    """The report as lines."""
    head = ["layer", "mean K", "V", "outliers K", "V", "offset", "score error plain"]
    head += ["predicted", "measured", "KL plain", "K", "V", "format", "bytes"]
    rows = [head]
    for layer in result["layers"]:
        key, value, config = layer["key"], layer["value"], layer["config"]
        offsets = "".join(n for n, side in (("K", key), ("V", value)) if side["offset"])
        rows.append(
            [
                str(layer["layer"]),
                f"{key['mean_energy']:.0%}",
                f"{value['mean_energy']:.0%}",
                str(key["outliers"]),
                str(value["outliers"]),
                offsets or "-",
                *(f"{error:.3f}" for error in layer["score_error"].values()),
                *(f"{1e3 * kl:.2f}" for kl in layer["divergence"].values()),
                layer["preset"] or f"{config['key']}+{config['value']}",
                str(layer["bytes"]),
            ]
        )
    return "\n".join(
        [
            f"{result['model']}: {result['tokens']:,} tokens read and {result['own_tokens']:,} "
            "written, a quarter of them held out",
            "",
            *table(rows),
            "",
            "mean: share of the mean in the energy; score error: root mean square over all pairs "
            "of query and key; KL: expected, in nats / 1000, with that layer alone packed",
            f"{result['bits']:.2f} bits a coordinate, metadata included; KL in nats, expected "
            f"{result['expected_divergence']:.4f}, on the last window measured "
            f"{result['measured_divergence']:.4f}",
            f"written: {result['out']}",
        ]
    )
