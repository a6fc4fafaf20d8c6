"""Checked safetensors files: versioned, with a checksum over everything, written atomically.

Arrays may be larger than the memory that is left: they are written and read in blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

FORMAT_VERSION = "1"
#: Bytes of an array that are read at a time, about.
BLOCK_BYTES = 16 * 2**20

_NO_CHECKSUM = "0" * 64
_LETTERS = {"f": "F", "i": "I", "u": "U"}


class Blocks(NamedTuple):
    """An array of a file that is made while it is written.

    Attributes:
        dtype: name of a numpy dtype.
        shape: of the whole array.
        blocks: its bytes in order, in arrays of any shape.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "reading and writing files needs the safetensors package: pip install safetensors"
        ) from error
    return safetensors


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """What the checksum covers of an array besides its numbers."""
    return json.dumps([name, dtype, list(shape)]).encode()


def _preamble(metadata: Mapping[str, str]) -> bytes:
    """What the checksum covers of the metadata."""
    return json.dumps(dict(metadata), sort_keys=True).encode()


class _Layout(NamedTuple):
    """Where a safetensors file has its arrays: offsets from its end of the header."""

    entries: dict[str, Any]
    size: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        text = json.dumps(
            {"__metadata__": dict(sorted(metadata.items())), **self.entries},
            separators=(",", ":"),
        ).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _layout(arrays: Mapping[str, Blocks]) -> _Layout:
    # Readers that map files into memory find every array aligned if the widest come first.
    order = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    entries, end = {}, 0
    for name in order:
        dtype, shape = np.dtype(arrays[name].dtype), arrays[name].shape
        begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        letters = f"{_LETTERS[dtype.kind]}{8 * dtype.itemsize}"
        entries[name] = {"dtype": letters, "shape": list(shape), "data_offsets": [begin, end]}
    return _Layout(entries, end)


def save(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray | Blocks],
    metadata: Mapping[str, str],
) -> None:
    """Writes ``arrays`` and ``metadata`` to ``path`` as one safetensors file, atomically.

    Raises:
        ImportError: the ``safetensors`` package, without which nobody could read it, is missing.
        OSError: the file cannot be written; it is named, and the one that was there is unchanged.
    """
    _safetensors()
    given = {
        name: a if isinstance(a, Blocks) else Blocks(a.dtype.name, a.shape, (a,))
        for name, a in arrays.items()
    }
    stamped = {**metadata, "format_version": FORMAT_VERSION}
    try:
        with _replacing(os.path.abspath(path)) as stream:
            _write(stream, given, stamped)
    except OSError as error:
        if error.errno is None:
            raise
        # It names the temporary file, or two.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _write(stream: Any, arrays: Mapping[str, Blocks], metadata: dict[str, str]) -> None:
    layout = _layout(arrays)
    state = hashlib.sha256(_preamble(metadata))
    start = len(layout.header({**metadata, "checksum": _NO_CHECKSUM}))
    stream.truncate(start + layout.size)
    for name in sorted(arrays):
        dtype, shape, blocks = arrays[name]
        state.update(_entry(name, dtype, shape))
        begin, end = (start + offset for offset in layout.entries[name]["data_offsets"])
        stream.seek(begin)
        little = np.dtype(dtype).newbyteorder("<")
        for block in blocks:
            data = np.ascontiguousarray(block, little).reshape(-1).view(np.uint8)
            state.update(data.data)
            stream.write(data)
        assert stream.tell() == end, f"{name}: blocks of another size than {shape}"
    stream.seek(0)
    stream.write(layout.header({**metadata, "checksum": state.hexdigest()}))


@contextmanager
def _replacing(target: str) -> Iterator[Any]:
    """A stream into a file beside ``target``, which then takes its place."""
    folder, name = os.path.split(target)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=name[:32] + ".")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


class Reader:
    """An open file of :func:`save`, whose bytes are hashed as they are read.

    What was read is to be trusted once :meth:`check` returns. All arrays are to be read before,
    each once, in ascending order of their names.

    Attributes:
        metadata: without version and checksum.
        arrays: dtype name and shape of the arrays by name.
    """

    def __init__(self, file: Any, name: str, metadata: dict[str, str]) -> None:
        self._file, self._name = file, name
        self._checksum = metadata.pop("checksum", None)
        self._state = hashlib.sha256(_preamble(metadata))
        del metadata["format_version"]
        self.metadata = metadata
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._unread = sorted(file.keys())
        for key in self._unread:
            view = file.get_slice(key)
            letters = view.get_dtype()
            kind = {v: k for k, v in _LETTERS.items()}[letters[:1]]
            dtype = np.dtype(f"{kind}{int(letters[1:]) // 8}").name
            self.arrays[key] = dtype, tuple(view.get_shape())

    def _next(self, name: str) -> tuple[str, tuple[int, ...]]:
        assert self._unread[0] == name, f"{name}: expected {self._unread[0]} to be read first"
        del self._unread[0]
        dtype, shape = self.arrays[name]
        self._state.update(_entry(name, dtype, shape))
        return dtype, shape

    def array(self, name: str) -> np.ndarray:
        """The whole array."""
        self._next(name)
        array: np.ndarray = self._file.get_tensor(name)
        self._state.update(np.ascontiguousarray(array).data)
        return array

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Runs of the array along its first axis, each with its place."""
        _, shape = self._next(name)
        if 0 in shape:
            return
        view = self._file.get_slice(name)
        size = np.dtype(self.arrays[name][0]).itemsize * int(np.prod(shape[1:], dtype=np.int64))
        step = max(1, BLOCK_BYTES // size)
        for start in range(0, shape[0], step):
            block = np.ascontiguousarray(view[start : min(start + step, shape[0])])
            self._state.update(block.data)
            yield start, block

    def check(self) -> None:
        """The checksum is right.

        Raises:
            ValueError: it is not.
        """
        assert not self._unread, f"{self._unread}: not read"
        if self._checksum != self._state.hexdigest():
            raise ValueError(f"{self._name}: wrong checksum, the file is damaged")


@contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[Reader]:
    """Opens a file of :func:`save`.

    Args:
        path: the file.
        kind: what ``metadata["kind"]`` must be.

    Raises:
        FileNotFoundError: no such file.
        ImportError: the ``safetensors`` package is missing.
        ValueError: not such a file, of another kind or version, or truncated.
    """
    library = _safetensors()
    name = os.fspath(path)
    try:
        file = library.safe_open(name, framework="numpy")
        metadata = dict(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (library.SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: not a readable safetensors file: {error}") from error
    with file:
        version = metadata.get("format_version")
        if version is None:
            raise ValueError(f"{name}: has no format_version, so it was not written by tq")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{name}: has format_version {version!r}; this version of tq reads "
                f"{FORMAT_VERSION!r}"
            )
        if metadata.get("kind") != kind:
            raise ValueError(f"{name}: expected a {kind} file, got a {metadata.get('kind')} file")
        try:
            reader = Reader(file, name, metadata)
        except (library.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: holds arrays that tq does not write: {error}") from error
        yield reader


def load(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a file of :func:`save` and checks it.

    Args:
        path: the file.
        kind: what ``metadata["kind"]`` must be.

    Returns:
        Arrays by name, and the metadata without version and checksum.

    Raises:
        FileNotFoundError: no such file.
        ImportError: the ``safetensors`` package is missing.
        ValueError: not such a file, of another kind or version, truncated or altered.
    """
    with reading(path, kind) as reader:
        arrays = {name: reader.array(name) for name in sorted(reader.arrays)}
        reader.check()
        return arrays, reader.metadata
