"""Checked safetensors files: versioned, with a checksum over everything, written atomically.

Arrays may be larger than the memory that is left: they are written and read in blocks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

FORMAT_VERSION = "1"
#: Bytes of an array that are read at a time, about.
BLOCK_BYTES = 16 * 2**20

_NO_CHECKSUM = "0" * 64
_DIGEST = re.compile("[0-9a-f]{64}")
_NUMBER = re.compile("0|[1-9][0-9]{0,18}")
#: More numbers than an array can have.
_LARGEST = 2**48
_LETTERS = {
    np.dtype(f"{kind}{size}").name: f"{kind.upper()}{8 * size}"
    for kind, sizes in (("f", (2, 4, 8)), ("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)))
    for size in sizes
}
_DTYPES = {letters: name for name, letters in _LETTERS.items()}


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


def _path(path: Any) -> str:
    """The path as text; numbers, which open a file too, are none."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"path: expected a str or an os.PathLike of one, got {path!r}")
    return name


def number(metadata: Mapping[str, str], name: str) -> int:
    """A number of the metadata, as :func:`save` is given it: in decimal."""
    if not _NUMBER.fullmatch(metadata[name]):
        raise ValueError(f"{name}: expected a number in decimal, got {metadata[name]!r:.80}")
    return int(metadata[name])


def digest(metadata: Mapping[str, str], name: str) -> str | None:
    """A digest of the metadata; None where there is none."""
    text = metadata.get(name)
    if text is not None and not _DIGEST.fullmatch(text):
        raise ValueError(f"{name}: expected a digest of 64 hex digits, got {text!r:.80}")
    return text


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
        letters = _LETTERS[dtype.name]
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
        TypeError: ``path`` is none.
    """
    name = _path(path)
    _safetensors()
    given = {
        name: a if isinstance(a, Blocks) else Blocks(a.dtype.name, a.shape, (a,))
        for name, a in arrays.items()
    }
    stamped = {**metadata, "format_version": FORMAT_VERSION}
    try:
        with _replacing(os.path.abspath(name)) as stream:
            _write(stream, given, stamped)
    except OSError as error:
        if error.errno is None:
            raise
        # It names the temporary file, or two.
        raise OSError(error.errno, error.strerror, name) from error


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
    """A stream into a file beside ``target``, which then takes its place and its permissions."""
    mode = _mode(target)
    folder, name = os.path.split(target)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=name[:32] + ".")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _mode(target: str) -> int:
    """Permissions of the file at ``target``, or of a new one."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        # A device or a pipe would be gone.
        raise OSError(errno.EINVAL, "Not a regular file")
    return stat.S_IMODE(mode)


class Reader:
    """An open file of :func:`save`, whose bytes are hashed as they are read.

    What was read is to be trusted once :meth:`check` returns. All arrays are to be read before,
    each once, in ascending order of their names.

    Attributes:
        name: the path.
        metadata: without version and checksum.
        arrays: dtype name and shape of the arrays by name.
    """

    def __init__(self, file: Any, name: str, metadata: dict[str, str]) -> None:
        self._file, self.name = file, name
        self._checksum = metadata.pop("checksum", None)
        self._state = hashlib.sha256(_preamble(metadata))
        del metadata["format_version"]
        self.metadata = metadata
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._unread = sorted(file.keys())
        for key in self._unread:
            view = file.get_slice(key)
            letters, shape = view.get_dtype(), tuple(view.get_shape())
            # Where one dimension is 0, no byte of the file bounds the others.
            if letters not in _DTYPES or math.prod(n for n in shape if n) > _LARGEST:
                raise ValueError(f"{name}: holds {key} as {letters}{list(shape)}, unlike tq's")
            self.arrays[key] = _DTYPES[letters], shape

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
            raise ValueError(f"{self.name}: wrong checksum, the file is damaged")


@contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[Reader]:
    """Opens a file of :func:`save`.

    Args:
        path: the file.
        kind: what ``metadata["kind"]`` must be.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        TypeError: ``path`` is none.
        ValueError: not such a file, of another kind or version, or truncated.
    """
    name = _path(path)
    library = _safetensors()
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ValueError("it is no regular file")
        # For the right error: the library has one for all.
        open(name, "rb").close()
        file = library.safe_open(name, framework="numpy")
        metadata = dict(file.metadata() or {})
    except (FileNotFoundError, PermissionError):
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
        yield Reader(file, name, metadata)


def load(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a file of :func:`save` and checks it.

    Args:
        path: the file.
        kind: what ``metadata["kind"]`` must be.

    Returns:
        Arrays by name, and the metadata without version and checksum.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        TypeError: ``path`` is none.
        ValueError: not such a file, of another kind or version, truncated or altered.
    """
    with reading(path, kind) as reader:
        arrays = {name: reader.array(name) for name in sorted(reader.arrays)}
        reader.check()
        return arrays, reader.metadata
