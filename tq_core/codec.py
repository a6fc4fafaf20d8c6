"""The codec: everything besides the bytes that store and readers must agree on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import numpy as np

from tq_core import codebook, files
from tq_core.config import QuantConfig
from tq_core.layout import MAX_HEAD_DIM, MIN_HEAD_DIM
from tq_core.rotation import make_rotation

_ORTHOGONALITY = 1e-4
_CONDITION = 1e6
_ARRAYS = (
    "rotation",
    "centroids",
    "value_centroids",
    "key_scale",
    "key_offset",
    "value_offset",
    "key_transform",
    "value_transform",
)


#: Living codecs by digest.
_LIVE: dict[str, list[ref[Codec]]] = {}


def codec_of(digest: str) -> Codec:
    """A living codec with this digest; compiled graphs hold nothing but the digest.

    Raises:
        LookupError: there is none any more.
    """
    for living in _LIVE.get(digest, ()):
        if (codec := living()) is not None:
            return codec
    raise LookupError(
        f"codec: no Codec with digest {digest[:12]} is alive in this process; keep the one that "
        "a graph was compiled with"
    )


class Codec:
    """Rotation, codebooks, scales, offsets and transforms of one model or layer.

    Immutable and hashed by content: two codecs with equal numbers are equal, and a codec can be a
    static argument of ``jax.jit``. All arrays are float32, read-only and C-contiguous.

    Args:
        config: formats of keys and values.
        head_dim: D, 8 to 576.
        seed: chooses the default rotation; unused when ``rotation`` is given.
        rotation: orthogonal ``[D, D]``, rows are the new axes. Default: signed Hadamard, or
            Haar-random where no Hadamard matrix of order D is constructible.
        centroids: ascending ``[2**key_bits]`` key codebook of a coordinate of a rotated unit
            vector. Default: close to the Lloyd-Max levels of N(0, 1/D), see docs/format.md.
            Refused for fp8 keys.
        key_scale: fp8 keys are divided by it before rounding; a positive number or ``[Hk]``.
            Default 1. Refused for codebook keys, which have a scale of their own.
        key_offset: mu ``[Hk, D]`` or ``[D]``, subtracted from keys first.
        value_offset: nu, likewise for values.
        key_transform: T, invertible ``[Hk, D, D]`` or ``[D, D]``: keys are coded as ``T (k - mu)``.
        value_transform: likewise for values.
        value_centroids: as ``centroids``, for codebook values. Refused for affine ones.

    Attributes:
        rotation: float32 ``[D, D]``.
        centroids: float32 ``[2**key_bits]``, or None for fp8 keys.
        value_centroids: float32 ``[2**value_bits]``, or None for affine values.
        key_scale: float32 ``[1]`` or ``[Hk]``.
        key_offset, value_offset: float32 ``[1, D]`` or ``[Hk, D]``, or None.
        key_transform, value_transform: float32 ``[1, D, D]`` or ``[Hk, D, D]``, or None.
        key_matrix: what a key is multiplied by after the offset, ``R T`` (fp8: ``T``); float32
            ``[1 or Hk, D, D]``.
        query_matrix: what a query is multiplied by, ``R T^-T`` (fp8: ``T^-T``).
        value_matrix: ``R T`` for codebook values, ``T`` for affine ones.
        output_matrix: inverse of ``value_matrix``; what an output row is multiplied by.
        digest: SHA-256 of the content, in hex.

    Raises:
        TypeError: ``config`` is not a :class:`QuantConfig`.
        ValueError: a wrong shape, a non-finite number, a rotation that is not orthogonal, a
            transform that is not invertible, unordered centroids, or an argument that the formats
            cannot use.

    Example:
        >>> codec = Codec(QuantConfig.preset("3bit"), head_dim=128)
        >>> codec.centroids.shape
        (8,)

    Source: TurboQuant, arXiv 2504.19874, section 3.
    """

    def __init__(
        self,
        config: QuantConfig,
        head_dim: int,
        seed: int = 0,
        rotation: Any = None,
        centroids: Any = None,
        key_scale: Any = None,
        key_offset: Any = None,
        value_offset: Any = None,
        key_transform: Any = None,
        value_transform: Any = None,
        value_centroids: Any = None,
    ) -> None:
        if not isinstance(config, QuantConfig):
            raise TypeError(f"config: expected a QuantConfig, got {type(config).__name__}")
        for name, number in (("head_dim", head_dim), ("seed", seed)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise TypeError(f"{name}: expected an int, got {number!r}")
        if seed < 0:
            raise ValueError(f"seed: expected at least 0, got {seed}")
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {head_dim}")
        self.config = config
        self.head_dim = int(head_dim)
        self.rotation = _rotation(rotation, self.head_dim, seed)
        self.centroids = _centroids(
            "centroids", centroids, config.key_is_codebook, config.key_bits, self.head_dim
        )
        self.value_centroids = _centroids(
            "value_centroids",
            value_centroids,
            config.value_is_codebook,
            config.value_bits,
            self.head_dim,
        )
        self.key_scale = _key_scale(key_scale, config)
        self.key_offset = _offset("key_offset", key_offset, self.head_dim)
        self.value_offset = _offset("value_offset", value_offset, self.head_dim)
        self.key_transform = _transform("key_transform", key_transform, self.head_dim)
        self.value_transform = _transform("value_transform", value_transform, self.head_dim)
        heads = {
            name: array.shape[0]
            for name in _ARRAYS[3:]
            if (array := getattr(self, name)) is not None and array.shape[0] > 1
        }
        if len(set(heads.values())) > 1:
            raise ValueError(f"codec: expected arrays of one number of KV heads, got {heads}")
        self.num_kv_heads: int | None = next(iter(heads.values()), None)
        self.digest = self._digest()
        self._register()

    def __setattr__(self, name: str, value: Any) -> None:
        if "digest" in self.__dict__:
            raise AttributeError(f"{name}: a Codec is immutable; make a new one")
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        digest = self.digest
        living = _LIVE.setdefault(digest, [])

        def forget(dead: ref[Codec]) -> None:
            living.remove(dead)
            if not living and _LIVE.get(digest) is living:
                del _LIVE[digest]

        living.append(ref(self, forget))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Codec is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        given = [n for n in _ARRAYS[3:] if n != "key_scale" and getattr(self, n) is not None]
        extra = "".join(f", {name}" for name in given)
        return f"Codec({self.config}, head_dim={self.head_dim}{extra}, digest={self.digest[:12]})"

    @cached_property
    def key_matrix(self) -> np.ndarray:
        """What a key is multiplied by after the offset; float32 ``[1 or Hk, D, D]``."""
        return self._forward(self.key_transform, self.config.key_is_codebook)

    @cached_property
    def query_matrix(self) -> np.ndarray:
        """What a query is multiplied by; float32 ``[1 or Hk, D, D]``."""
        if self.key_transform is None:
            return self.key_matrix
        inverse = np.linalg.inv(self.key_transform.astype(np.float64)).swapaxes(1, 2)
        if self.config.key_is_codebook:
            inverse = self.rotation.astype(np.float64) @ inverse
        return _array(inverse)

    @cached_property
    def value_matrix(self) -> np.ndarray:
        """What a value is multiplied by after the offset; float32 ``[1 or Hk, D, D]``."""
        return self._forward(self.value_transform, self.config.value_is_codebook)

    @cached_property
    def output_matrix(self) -> np.ndarray:
        """Inverse of ``value_matrix``; what an output row is multiplied by."""
        rotation = self.rotation.astype(np.float64)
        if self.value_transform is None:
            identity = np.eye(self.head_dim)
            return _array((rotation.T if self.config.value_is_codebook else identity)[None])
        inverse = np.linalg.inv(self.value_transform.astype(np.float64))
        return _array(inverse @ rotation.T if self.config.value_is_codebook else inverse)

    @property
    def has_key_matrix(self) -> bool:
        """Whether ``key_matrix`` and ``query_matrix`` are more than the identity."""
        return self.config.key_is_codebook or self.key_transform is not None

    @property
    def has_value_matrix(self) -> bool:
        """Whether ``value_matrix`` and ``output_matrix`` are more than the identity."""
        return self.config.value_is_codebook or self.value_transform is not None

    def _forward(self, transform: np.ndarray | None, rotated: bool) -> np.ndarray:
        if transform is None:
            return _array((self.rotation if rotated else np.eye(self.head_dim))[None])
        if not rotated:
            return transform
        return _array(self.rotation.astype(np.float64) @ transform.astype(np.float64))

    def _arrays(self) -> dict[str, np.ndarray]:
        return {n: a for n in _ARRAYS if (a := getattr(self, n)) is not None}

    def _metadata(self) -> dict[str, str]:
        config = self.config
        return {
            "kind": "codec",
            "key": config.key,
            "value": config.value,
            "norm_correction": str(config.norm_correction).lower(),
            "key_packing": config.key_packing,
            "head_dim": str(self.head_dim),
        }

    def _digest(self) -> str:
        state = hashlib.sha256(repr(sorted(self._metadata().items())).encode())
        for name, array in self._arrays().items():
            state.update(f"{name}{array.shape}".encode())
            state.update(np.ascontiguousarray(array, "<f4").tobytes())
        return state.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, atomically: a crash leaves the old file or none.

        Args:
            path: file to create or replace.

        Raises:
            ImportError: the ``safetensors`` package is missing.
            OSError: ``path`` cannot be written.
        """
        files.save(path, self._arrays(), self._metadata())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Codec:
        """Reads a file of :meth:`save`.

        Raises:
            FileNotFoundError: no such file, or PermissionError: one that may not be read.
            ImportError: the ``safetensors`` package is missing.
            ValueError: not a codec file, an unknown version, or a damaged one.
        """
        arrays, metadata = files.load(path, kind="codec")
        try:
            return cls._restore(arrays, metadata)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: not a valid codec file: {error}") from error

    @classmethod
    def _restore(cls, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Codec:
        """The codec with these ``_arrays`` and ``_metadata``."""
        arrays = dict(arrays)
        config = QuantConfig(
            key=metadata["key"],
            value=metadata["value"],
            norm_correction={"true": True, "false": False}[metadata["norm_correction"]],
            key_packing=metadata["key_packing"],
        )
        required = {
            "rotation": True,
            "key_scale": True,
            "centroids": config.key_is_codebook,
            "value_centroids": config.value_is_codebook,
        }
        if missing := [n for n, needed in required.items() if needed and n not in arrays]:
            raise KeyError(f"missing arrays {missing}")
        arguments: dict[str, Any] = {name: arrays.pop(name, None) for name in _ARRAYS}
        if config.key_is_codebook:
            arguments["key_scale"] = None
        if arrays:
            raise KeyError(f"unknown arrays {sorted(arrays)}")
        return cls(config, files.number(metadata, "head_dim"), **arguments)


@dataclass(frozen=True)
class CodecFile:
    """What :func:`load_codecs` read.

    Attributes:
        codecs: a codec for each layer.
        model: what the file says about its model, plain strings; ``num_kv_heads`` where known.
        report: what the calibration measured, or whatever else was saved; JSON values.
    """

    codecs: tuple[Codec, ...]
    model: dict[str, str]
    report: dict[str, Any]


def save_codecs(
    path: str | os.PathLike[str],
    codecs: Sequence[Codec],
    model: Mapping[str, str] | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Writes the codecs of a model's layers as one safetensors file, atomically.

    Args:
        path: file to create or replace.
        codecs: one for each layer, of one head_dim.
        model: names of the model and its sizes, to be compared by whoever loads the file.
        report: JSON values to keep beside the codecs.

    Raises:
        ImportError: the ``safetensors`` package is missing.
        ValueError: no codecs, or codecs of several head_dims or numbers of KV heads.
    """
    if not codecs:
        raise ValueError("codecs: expected at least one")
    for name in ("head_dim", "num_kv_heads"):
        found = {value for codec in codecs if (value := getattr(codec, name)) is not None}
        if len(found) > 1:
            raise ValueError(f"codecs: expected one {name} in all, got {sorted(found)}")
    arrays: dict[str, np.ndarray] = {}
    layers = []
    places: dict[tuple[str, bytes], str] = {}
    for number, codec in enumerate(codecs):
        names = {}
        for name, array in codec._arrays().items():
            # Layers mostly share rotation and centroids: what is equal is stored once.
            content = name, hashlib.sha256(repr(array.shape).encode() + array.tobytes()).digest()
            names[name] = places.setdefault(content, f"{number}.{name}")
            arrays.setdefault(names[name], array)
        layers.append({**codec._metadata(), "digest": codec.digest, "arrays": names})
    metadata = {
        "kind": "codecs",
        "layers": json.dumps(layers),
        "model": json.dumps(dict(model or {})),
        "report": json.dumps(dict(report or {})),
    }
    files.save(path, arrays, metadata)


def load_codecs(
    path: str | os.PathLike[str],
    *,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> CodecFile:
    """Reads a file of :func:`save_codecs`, and checks that it is for a model of these sizes.

    Args:
        path: the file.
        num_layers: layers that the model has; None does not check.
        num_kv_heads: KV heads of the model; None does not check.
        head_dim: of the model; None does not check.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        ValueError: not such a file, a damaged one, or one for another model.
    """
    where = os.fspath(path)
    arrays, metadata = files.load(path, kind="codecs")
    codecs = []
    try:
        model, report = json.loads(metadata["model"]), json.loads(metadata["report"])
        for number, layer in enumerate(json.loads(metadata["layers"])):
            own = {name: arrays[place] for name, place in layer["arrays"].items()}
            codec = Codec._restore(own, layer)
            if codec.digest != layer["digest"]:
                raise ValueError(f"layer {number} is not the codec that was saved")
            codecs.append(codec)
        heads = {heads for codec in codecs if (heads := codec.num_kv_heads) is not None}
        if "num_kv_heads" in model:
            heads.add(int(model["num_kv_heads"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a valid file of codecs: {error}") from error
    dims = {codec.head_dim for codec in codecs}
    for name, wanted, found in (
        ("layers", num_layers, {len(codecs)}),
        ("KV heads", num_kv_heads, heads),
        ("coordinates a head (head_dim)", head_dim, dims),
    ):
        if wanted is not None and found - {wanted}:
            raise ValueError(
                f"{where}: expected codecs for a model of {wanted} {name}, got {max(found)}"
            )
    return CodecFile(tuple(codecs), model, report)


def _array(value: Any, name: str = "") -> np.ndarray:
    try:
        given = np.asarray(value)
        with np.errstate(over="ignore"):
            array = np.array(given.astype(np.float32, casting="same_kind"), order="C")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected an array of real numbers, got {value!r:.80}") from error
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name}: expected finite float32 numbers, got {int((~np.isfinite(array)).sum())} "
            "that are not"
        )
    array.flags.writeable = False
    return array


def _shaped(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """``value`` as float32 ``[heads, *shape]``, a missing head axis added."""
    array = _array(value, name)
    if array.ndim == len(shape):
        array = array[None]
    if array.shape[1:] != shape or array.ndim != len(shape) + 1 or not array.shape[0]:
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"{name}: expected shape ({wanted}) or (num_kv_heads, {wanted}), "
            f"got {tuple(np.shape(value))}"
        )
    return array


def _rotation(value: Any, head_dim: int, seed: int) -> np.ndarray:
    if value is None:
        return _array(make_rotation(head_dim, seed))
    array = _array(value, "rotation")
    if array.shape != (head_dim, head_dim):
        raise ValueError(f"rotation: expected shape ({head_dim}, {head_dim}), got {array.shape}")
    error = np.abs(array.astype(np.float64) @ array.T - np.eye(head_dim)).max()
    if error > _ORTHOGONALITY:
        raise ValueError(
            f"rotation: expected an orthogonal matrix, got max |R R^T - I| = {error:.2g}"
        )
    return array


def _centroids(name: str, value: Any, used: bool, bits: int, head_dim: int) -> np.ndarray | None:
    if not used:
        if value is not None:
            raise ValueError(f"{name}: this format has no codebook; leave the argument out")
        return None
    if value is None:
        keys = name == "centroids"
        default = codebook.default_centroids if keys else codebook.default_value_centroids
        return _array(default(bits, head_dim))
    array = _array(value, name)
    if array.shape != (2**bits,) or not (np.diff(array) > 0).all():
        raise ValueError(
            f"{name}: expected {2**bits} strictly ascending numbers, got {np.shape(value)} "
            "numbers" + ("" if array.shape != (2**bits,) else " that are not ascending")
        )
    return array


def _key_scale(value: Any, config: QuantConfig) -> np.ndarray:
    if value is None:
        return _array(np.ones(1))
    if config.key_is_codebook:
        raise ValueError(
            f"key_scale: is for key='fp8' only (key={config.key!r} stores a scale with every "
            "token); leave the argument out"
        )
    array = np.atleast_1d(_array(value, "key_scale"))
    if array.ndim != 1 or not array.size or not (array > 0).all():
        raise ValueError(
            f"key_scale: expected a positive number or one per KV head, got {value!r:.80}"
        )
    return array


def _offset(name: str, value: Any, head_dim: int) -> np.ndarray | None:
    return None if value is None else _shaped(name, value, (head_dim,))


def _transform(name: str, value: Any, head_dim: int) -> np.ndarray | None:
    if value is None:
        return None
    array = _shaped(name, value, (head_dim, head_dim))
    singular = np.linalg.svd(array.astype(np.float64), compute_uv=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        condition = (singular[:, 0] / singular[:, -1]).max()
    if not condition < _CONDITION:
        raise ValueError(
            f"{name}: expected an invertible matrix (condition number below {_CONDITION:g}), "
            f"got {'a singular one' if np.isnan(condition) else f'{condition:.2g}'}"
        )
    if singular.min() < np.finfo(np.float32).tiny:
        raise ValueError(
            f"{name}: expected a matrix whose inverse float32 can hold, got a smallest singular "
            f"value of {singular.min():.2g}"
        )
    return array
