"""Checked safetensors files: versioned, with a checksum over everything, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

FORMAT_VERSION = "1"


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "reading and writing files needs the safetensors package: pip install safetensors"
        ) from error
    return safetensors


def _checksum(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    state = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        state.update(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def save(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes ``arrays`` and ``metadata`` to ``path`` as one safetensors file, atomically.

    Raises:
        OSError: the file cannot be written; it is named, and the one that was there is unchanged.
    """
    library = _safetensors()
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    stamped = {**metadata, "format_version": FORMAT_VERSION}
    stamped["checksum"] = _checksum(plain, stamped)
    data = library.numpy.save(plain, metadata=stamped)
    try:
        _replace(os.path.abspath(path), data)
    except OSError as error:
        if error.errno is None:
            raise
        # It names the temporary file, or two.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(target: str, data: bytes) -> None:
    """Writes a file beside ``target`` and puts it in its place."""
    folder, name = os.path.split(target)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=name[:32] + ".")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a file of :func:`save` and checks it.

    Args:
        path: the file.
        kind: what ``metadata["kind"]`` must be.

    Returns:
        Arrays by name, and the metadata without version and checksum.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, of another kind or version, truncated or altered.
    """
    library = _safetensors()
    name = os.fspath(path)
    try:
        with library.safe_open(name, framework="numpy") as reader:
            metadata = dict(reader.metadata() or {})
            arrays = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (library.SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: not a readable safetensors file: {error}") from error
    version = metadata.get("format_version")
    if version is None:
        raise ValueError(f"{name}: has no format_version, so it was not written by tq")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{name}: has format_version {version!r}; this version of tq reads {FORMAT_VERSION!r}"
        )
    if metadata.get("kind") != kind:
        raise ValueError(f"{name}: expected a {kind} file, got a {metadata.get('kind')} file")
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(arrays, metadata):
        raise ValueError(f"{name}: wrong checksum, the file is damaged")
    del metadata["format_version"]
    return arrays, metadata
