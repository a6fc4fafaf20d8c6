"""``tq plan``: how many tokens of a model fit into memory, for every preset."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tq_cli.errors import CommandError
from tq_cli.machine import inspect
from tq_cli.model import Model, config_path, read_model, stored_weights
from tq_cli.sizes import parse_share, parse_size, show_size
from tq_cli.table import table
from tq_core import PRESETS, CacheLayout, QuantConfig, why_unsupported

DESCRIPTION = """\
Say how many tokens of a model fit beside its weights, for every preset and for a
16-bit cache. Reads the model's config.json, downloads nothing and loads no weights.

  tq plan path/to/model --memory 80GB --length 32768
  tq plan config.json --device --weights 16GB --batch 64"""
BASELINE = "16 bit"
DEFAULT_LENGTH = 8192
DEFAULT_BITS = 16
#: The size that every backend takes, to tell a model's reasons from this machine's.
_COMMON_HEAD_DIM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``tq plan``."""
    parser.add_argument(
        "config", metavar="CONFIG", type=Path, help="a config.json, or a folder that holds one"
    )
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", metavar="SIZE", help="memory of the device: 80GB, 75GiB")
    memory.add_argument(
        "--device", action="store_true", help="take the memory of this machine's first GPU"
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--weights",
        metavar="SIZE",
        help="memory that the weights take; default: the size of the *.safetensors beside the "
        "config, or else an estimate from the config",
    )
    weights.add_argument(
        "--weight-bits",
        metavar="N",
        type=_positive,
        help=f"bits a parameter of that estimate (default: {DEFAULT_BITS}); if given, files "
        "beside the config are not looked at",
    )
    parser.add_argument(
        "--reserve",
        metavar="SHARE",
        default="10%",
        help="memory kept for activations and the rest, a share or a size (default: 10%%)",
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=_positive,
        default=1,
        help="sequences that share the cache equally, for the columns 'tokens' and 'each' "
        "(default: 1)",
    )
    parser.add_argument(
        "--length",
        metavar="N",
        type=_positive,
        default=DEFAULT_LENGTH,
        help=f"tokens of a sequence, for the column 'sequences' (default: {DEFAULT_LENGTH})",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Fit:
    """What fits in one format; None where the format cannot hold the model or nothing limits it.

    Attributes:
        preset: its name.
        bytes_per_token: of all layers, as long as no window is full.
        ratio: how many times smaller than 16 bits.
        tokens: most tokens over the batch.
        each: most tokens of each sequence of the batch.
        sequences: most sequences of the asked length.
        unlimited: every layer has a window and all windows of the batch fit, at any length.
        reasons: why it does not run, or not with the kernels.
    """

    preset: str
    bytes_per_token: int | None = None
    ratio: float | None = None
    tokens: int | None = None
    each: int | None = None
    sequences: int | None = None
    unlimited: bool = False
    reasons: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All that ``tq plan`` prints.

    Raises:
        CommandError: the config or a size is not one, or nothing is left for the cache.
    """
    model = read_model(args.config)
    memory = _device_memory() if args.device else parse_size("--memory", args.memory)
    reserve = parse_share("--reserve", args.reserve, memory)
    weights, source = _weights(args, model)
    cache = memory - reserve - weights
    if cache <= 0:
        raise CommandError(
            f"nothing is left for the cache: the memory is {show_size(memory)}, the weights take "
            f"{show_size(weights)} ({source}) and {show_size(reserve)} are reserved"
        )
    fits = [_baseline(model, cache, args.batch, args.length)]
    fits += [fit_preset(name, model, cache, args.batch, args.length) for name in PRESETS]
    return {
        "config": str(args.config),
        "model": {
            "model_type": model.model_type,
            "layers": model.num_layers,
            "window_layers": model.window_layers,
            "window": model.window,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
        },
        "memory": memory,
        "reserve": reserve,
        "weights": weights,
        "weights_source": source,
        "cache": cache,
        "batch": args.batch,
        "length": args.length,
        "presets": [{**asdict(fit), "reasons": list(fit.reasons)} for fit in fits],
    }


def _device_memory() -> int:
    reasons = []
    for framework in ("torch", "jax"):
        machine = inspect(framework)
        for device in machine.gpus[:1]:
            if device.memory:
                return device.memory
        reasons.append(machine.reason or f"{framework} sees no GPU")
    raise CommandError("--device: " + ", and ".join(reasons) + "; use --memory instead")


def _weights(args: argparse.Namespace, model: Model) -> tuple[int, str]:
    """Bytes of the weights and where the number is from."""
    if args.weights is not None:
        return parse_size("--weights", args.weights), "given"
    if args.weight_bits is None:
        stored = stored_weights(config_path(args.config).parent)
        if stored is not None:
            return stored, "the safetensors files beside the config"
    if model.parameters is None:
        raise CommandError(f"the weights cannot be estimated, give --weights: {model.missing}")
    bits = args.weight_bits or DEFAULT_BITS
    source = f"estimated: {model.parameters:,} parameters of {bits} bits"
    if model.has_vision:
        source += ", text model only"
    return -(-model.parameters * bits // 8), source


def _baseline(model: Model, cache: int, batch: int, length: int) -> Fit:
    return _fit(BASELINE, model, 4 * model.num_kv_heads * model.head_dim, 1.0, cache, batch, length)


def fit_preset(name: str, model: Model, cache: int, batch: int, length: int) -> Fit:
    """What fits into ``cache`` bytes with the preset called ``name``."""
    config = QuantConfig.preset(name)
    try:
        layout = CacheLayout(config, model.num_kv_heads, model.head_dim, page_size=16)
    except ValueError as error:
        return Fit(name, reasons=(str(error),))
    fit = _fit(name, model, layout.bytes_per_token, layout.compression_ratio, cache, batch, length)
    return Fit(**{**asdict(fit), "reasons": _kernel_reasons(layout)})


def _kernel_reasons(layout: CacheLayout) -> tuple[str, ...]:
    """Why kernels cannot serve the layout, without what this machine lacks."""
    common = CacheLayout(layout.config, layout.num_kv_heads, _COMMON_HEAD_DIM, layout.page_size)
    of_machine = why_unsupported(common, backend="triton", target="cuda")
    reasons = why_unsupported(layout, backend="triton", target="cuda")
    return tuple(reason for reason in reasons if reason not in of_machine)


def _fit(
    name: str, model: Model, layer: int, ratio: float, cache: int, batch: int, length: int
) -> Fit:
    """``layer``: bytes of a token in one layer."""
    each = longest(model, layer, cache // batch)
    return Fit(
        preset=name,
        bytes_per_token=layer * model.num_layers,
        ratio=round(ratio, 4),
        tokens=None if each is None else batch * each,
        each=each,
        sequences=cache // sequence_bytes(model, layer, length),
        unlimited=each is None,
    )


def sequence_bytes(model: Model, layer: int, length: int) -> int:
    """Bytes of a sequence of ``length`` tokens, at ``layer`` bytes a token and layer."""
    tokens = model.full_layers * length + model.window_layers * min(length, model.window)
    return layer * tokens


def longest(model: Model, layer: int, size: int) -> int | None:
    """Tokens of the longest sequence that takes at most ``size`` bytes, None if any does."""
    tokens = size // (layer * model.num_layers)
    if not model.window_layers or tokens < model.window:
        return tokens
    if not model.full_layers:
        return None
    return (size - layer * model.window_layers * model.window) // (layer * model.full_layers)


def text(result: dict[str, Any]) -> str:
    """The result as lines."""
    model, length = result["model"], result["length"]
    lines = [
        f"{model['model_type']}: {model['layers']} layers, {model['num_kv_heads']} KV heads, "
        f"head_dim {model['head_dim']}"
    ]
    if model["window_layers"]:
        lines.append(
            f"{model['window_layers']} of the layers have a sliding window: they count at most "
            f"{model['window']:,} tokens a sequence"
        )
    lines += ["", *_memory_lines(result), ""]
    several = result["batch"] > 1
    head = ["preset", "bytes/token", "smaller", "tokens"]
    rows = [[*head, *(["each"] if several else []), f"sequences of {length:,}"]]
    rows += [_row(fit, several) for fit in result["presets"] if fit["bytes_per_token"]]
    lines += table(rows)
    if several:
        lines += ["", f"tokens: over {result['batch']} sequences of one length, 'each'"]
    return "\n".join([*lines, *_reason_lines(result["presets"])])


def _memory_lines(result: dict[str, Any]) -> list[str]:
    rows = [(name, show_size(result[name])) for name in ("memory", "reserve", "weights", "cache")]
    lines = table(rows)
    lines[2] += f"  ({result['weights_source']})"
    return lines


def _row(fit: dict[str, Any], several: bool) -> list[str]:
    columns = ["tokens", *(["each"] if several else [])]
    counts = ["any" if fit["unlimited"] else f"{fit[name]:,}" for name in columns]
    sizes = [f"{fit['bytes_per_token']:,}", f"{fit['ratio']:.2f}x"]
    return [fit["preset"], *sizes, *counts, f"{fit['sequences']:,}"]


def _reason_lines(fits: list[dict[str, Any]]) -> list[str]:
    """Each reason once, with the presets it holds for."""
    presets: dict[str, list[str]] = {}
    for fit in fits:
        verb = "not with kernels" if fit["bytes_per_token"] else "not supported"
        for reason in fit["reasons"]:
            presets.setdefault(f"{verb}: {reason}", []).append(fit["preset"])
    lines = [f"{', '.join(names)}: {reason}" for reason, names in presets.items()]
    return ["", *lines] if lines else []
