"""Offsets, transforms and bits of a model's layers, from moments.

The coder's error is isotropic in the coded basis and proportional to the squared length there. A
key coded as ``T (k - mu)`` and read by ``T^-T q`` therefore has a mean squared score error
proportional to ``tr(T Sk T^T) tr(T^-T Sq T^-1)``, with ``Sk`` and ``Sq`` the second moments of
``k - mu`` and of the queries. It is least for ``T^T T = Sk^-1 # Sq``, the matrix geometric mean.
The same holds for values, and for whatever the error is multiplied by in the place of queries, as
gradients of a loss.

Source: R. Bhatia, "Positive Definite Matrices" (2007), chapter 4, for the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tq_core import codebook
from tq_core.codec import Codec
from tq_core.config import QuantConfig
from tq_core.rotation import make_rotation

#: Shrinkages that a fit chooses from: shares of the mean diagonal that are added to the diagonal.
SHRINKAGES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
#: Tokens below which a fit is refused, for each of the two parts of the text: this many for each
#: coordinate, and this many at least. A transform fitted on 4 D tokens loses to no transform.
MIN_TOKENS_PER_COORDINATE = {"fitting": 16, "held-out": 4}
MIN_TOKENS = {"fitting": 768, "held-out": 192}
#: A held-out error has to be this much smaller before offset or transform are used at all.
MARGIN = 0.02
#: Mean squared relative error of fp8 (e4m3) on normal numbers, measured on 10^6 of them.
FP8_NOISE = 6.8e-4
#: Root mean square of a coordinate of transformed keys: far from the 448 where fp8 saturates and
#: from the 2^-6 where it loses digits.
KEY_SIZE = 4.0

OFFSET_CHOICES = (False, True)


class Moments:
    """Weighted first and second moments of vectors of each KV head, summed as they come.

    Args:
        num_heads: heads, each with its own moments.
        head_dim: D.

    Attributes:
        count: vectors added, of each head.
        weight: float64 ``[num_heads]``, sum of their weights.
        effective: vectors of equal weight that would carry as much, of the head with the fewest.

    Example:
        >>> moments = Moments(1, 2)
        >>> moments.add(np.array([[[1.0, 0.0]], [[3.0, 0.0]]]))
        >>> moments.mean, moments.centred
        (array([[2., 0.]]), array([[[1., 0.],
                [0., 0.]]]))
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.count = 0
        self.weight = np.zeros(num_heads)
        self._squares = np.zeros(num_heads)
        self._first = np.zeros((num_heads, head_dim))
        self._second = np.zeros((num_heads, head_dim, head_dim))

    def add(self, vectors: Any, weights: Any = None) -> None:
        """Adds vectors.

        Args:
            vectors: ``[N, num_heads, D]`` floats.
            weights: ``[N, num_heads]``, not negative. Default: all 1.
        """
        vectors = np.asarray(vectors, np.float64)
        heads, dim = self._first.shape
        if vectors.ndim != 3 or vectors.shape[1:] != (heads, dim):
            raise ValueError(f"vectors: expected [N, {heads}, {dim}], got {vectors.shape}")
        weights = np.ones(vectors.shape[:2]) if weights is None else np.asarray(weights, np.float64)
        if weights.shape != vectors.shape[:2] or not (weights >= 0).all():
            raise ValueError(
                f"weights: expected numbers of at least 0, {list(vectors.shape[:2])}, got shape "
                f"{weights.shape}"
            )
        self.add_sums(
            len(vectors),
            weights.sum(0),
            np.square(weights).sum(0),
            np.einsum("nh,nhd->hd", weights, vectors),
            np.einsum("nhd,nhe->hde", vectors * weights[..., None], vectors, optimize=True),
        )

    def add_sums(self, count: int, weight: Any, squares: Any, first: Any, second: Any) -> None:
        """Adds what a framework has summed on its device.

        Args:
            count: vectors of each head.
            weight: ``[num_heads]``, sum of the weights.
            squares: ``[num_heads]``, sum of their squares.
            first: ``[num_heads, D]``, weighted sum of the vectors.
            second: ``[num_heads, D, D]``, weighted sum of their outer products.
        """
        self.count += count
        for total, part in (
            (self.weight, weight),
            (self._squares, squares),
            (self._first, first),
            (self._second, second),
        ):
            array = np.asarray(part, np.float64)
            if array.shape != total.shape or not np.isfinite(array).all():
                raise ValueError(
                    f"moments: expected finite sums of shape {total.shape}, got {array.shape}"
                    + ("" if array.shape != total.shape else " with numbers that are not finite")
                )
            total += array

    def __add__(self, other: Moments) -> Moments:
        result = Moments(*self._first.shape)
        for part in (self, other):
            result.add_sums(part.count, part.weight, part._squares, part._first, part._second)
        return result

    @property
    def effective(self) -> float:
        """Vectors of equal weight that would carry as much."""
        return float((self.weight**2 / np.maximum(self._squares, 1e-300)).min())

    @property
    def mean(self) -> np.ndarray:
        """float64 ``[num_heads, D]``."""
        return self._first / self._whole[:, None]

    @property
    def raw(self) -> np.ndarray:
        """Second moments around zero, float64 ``[num_heads, D, D]``."""
        return self._second / self._whole[:, None, None]

    @property
    def centred(self) -> np.ndarray:
        """Second moments around the mean."""
        return self.around(self.mean)

    def around(self, offset: np.ndarray) -> np.ndarray:
        """Second moments around ``offset`` ``[num_heads, D]``."""
        cross = self.mean[:, :, None] * offset[:, None, :]
        outer = offset[:, :, None] * offset[:, None, :]
        return self.raw - cross - cross.swapaxes(1, 2) + outer

    @property
    def _whole(self) -> np.ndarray:
        return np.maximum(self.weight, 1e-300)


# --- the transform ----------------------------------------------------------------------------


def shrunk(moments: np.ndarray, shrinkage: float) -> np.ndarray:
    """``moments`` ``[..., D, D]`` with a share of the mean diagonal added to the diagonal."""
    dim = moments.shape[-1]
    level = shrinkage * np.trace(moments, axis1=-2, axis2=-1) / dim
    # A tensor that is 0 throughout, as a dead head's, still has to be invertible.
    level = np.maximum(level, 1e-30)
    return np.asarray(moments + level[..., None, None] * np.eye(dim))


def square_root(matrix: np.ndarray) -> np.ndarray:
    """Symmetric square root of symmetric positive definite ``[..., D, D]``."""
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.swapaxes(-1, -2)))
    roots = np.sqrt(np.maximum(values, values.max(-1, keepdims=True) * 1e-15))
    return np.asarray((vectors * roots[..., None, :]) @ vectors.swapaxes(-1, -2))


def geometric_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a # b``: the symmetric positive definite ``G`` with ``G a^-1 G = b``."""
    root = square_root(a)
    inverse = np.linalg.inv(root)
    return np.asarray(root @ square_root(inverse @ b @ inverse) @ root)


def best_transform(coded: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The ``T`` of least error: the symmetric square root of ``coded^-1 # read``.

    Args:
        coded: second moments of what is coded, ``[..., D, D]``, positive definite.
        read: second moments of what it is multiplied by.

    Returns:
        float64 ``[..., D, D]`` of determinant 1, which no result depends on.
    """
    transform = square_root(geometric_mean(np.linalg.inv(coded), read))
    _, log_determinant = np.linalg.slogdet(transform)
    return np.asarray(transform / np.exp(log_determinant / coded.shape[-1])[..., None, None])


def isotropic_error(coded: np.ndarray, read: np.ndarray, transform: np.ndarray | None) -> Any:
    """Mean squared error of a product per unit of the format's noise, ``[...]``.

    ``tr(T coded T^T) tr(T^-T read T^-1) / D``.

    Args:
        coded: second moments of what is coded, around the offset; ``[..., D, D]``.
        read: second moments of what it is multiplied by.
        transform: T ``[..., D, D]``; None is the identity.
    """
    dim = coded.shape[-1]
    if transform is None:
        length = np.trace(coded, axis1=-2, axis2=-1)
        return length * np.trace(read, axis1=-2, axis2=-1) / dim
    metric = transform.swapaxes(-1, -2) @ transform
    length = (metric * coded).sum((-2, -1))
    return length * (np.linalg.inv(metric) * read).sum((-2, -1)) / dim


# --- fitting ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One side of a layer's cache, keys or values: what is coded and what reads it.

    Attributes:
        coded: moments of keys or values of each KV head.
        read: moments of what errors are multiplied by: queries, or gradients.
        tokens: tokens that the moments are of.
        importance: float64 ``[Hk]``, what a head's error counts, relative to others.
    """

    coded: Moments
    read: Moments
    tokens: int
    importance: np.ndarray

    def error(self, offset: np.ndarray | None, transform: np.ndarray | None) -> float:
        """Mean squared error of the products per unit of noise, summed over heads."""
        around = self.coded.raw if offset is None else self.coded.around(offset)
        return float((self.importance * isotropic_error(around, self.read.raw, transform)).sum())

    def __add__(self, other: Part) -> Part:
        tokens = self.tokens + other.tokens
        importance = (self.importance * self.tokens + other.importance * other.tokens) / tokens
        return Part(self.coded + other.coded, self.read + other.read, tokens, importance)


@dataclass(frozen=True)
class Fit:
    """What a part of a layer is coded with, and what that is expected to bring.

    Attributes:
        offset: float64 ``[Hk, D]``, or None where the part is better without.
        transform: float64 ``[Hk, D, D]``, or None where the part is better without.
        shrinkage: that of the transform.
        gain: held-out squared error with both, over that of the plain format; at most 1.
        mean_energy: share of the mean in the energy of what is coded, 0 to 1.
        outliers: channels whose mean square is over 10 times that of the head's median channel.
    """

    offset: np.ndarray | None
    transform: np.ndarray | None
    shrinkage: float
    gain: float
    mean_energy: float
    outliers: int


def check_tokens(fitting: int, held_out: int, head_dim: int) -> None:
    """Refuses too little text.

    Raises:
        ValueError: it says how many tokens are needed.
    """
    for name, tokens in (("fitting", fitting), ("held-out", held_out)):
        need = max(MIN_TOKENS[name], MIN_TOKENS_PER_COORDINATE[name] * head_dim)
        if tokens < need:
            raise ValueError(
                f"text: expected at least {need} {name} tokens for head_dim {head_dim}, got "
                f"{tokens}; moments of fewer would fit that text and harm others"
            )


def fit(
    fitting: Part,
    held_out: Part,
    *,
    offsets: Sequence[bool] = OFFSET_CHOICES,
    shrinkages: Sequence[float] = SHRINKAGES,
) -> Fit:
    """Offset and transform of a part: those with the least error on held-out tokens.

    Offset or not, and how much the moments are shrunk, is chosen on the held-out tokens; the
    winner is then fitted anew on all tokens. Neither is used where they do not win by ``MARGIN``.

    Args:
        fitting: moments of the tokens that candidates are fitted on.
        held_out: moments of others.
        offsets: whether a candidate subtracts the mean.
        shrinkages: candidates' shares of the mean diagonal that are added to the diagonal.

    Raises:
        ValueError: too few tokens.
    """
    head_dim = fitting.coded.mean.shape[-1]
    check_tokens(fitting.tokens, held_out.tokens, head_dim)
    plain = held_out.error(None, None)
    candidates: list[tuple[float, bool, float | None]] = [(plain * (1 - MARGIN), False, None)]
    for centre in offsets:
        for shrinkage in (None, *shrinkages):
            offset, transform = _solve(fitting, centre, shrinkage)
            candidates.append((held_out.error(offset, transform), centre, shrinkage))
    error, centre, shrinkage = min(candidates, key=lambda candidate: candidate[0])
    whole = fitting + held_out
    offset, transform = _solve(whole, centre, shrinkage)
    plain_wins = not centre and shrinkage is None
    return Fit(
        offset,
        transform,
        0.0 if shrinkage is None else shrinkage,
        1.0 if plain_wins or not plain else error / plain,
        _mean_energy(whole.coded),
        _outliers(whole.coded),
    )


def _solve(
    part: Part, centre: bool, shrinkage: float | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    offset = part.coded.mean if centre else None
    if shrinkage is None:
        return offset, None
    coded = part.coded.centred if centre else part.coded.raw
    return offset, best_transform(shrunk(coded, shrinkage), shrunk(part.read.raw, shrinkage))


def _mean_energy(moments: Moments) -> float:
    total = np.trace(moments.raw, axis1=1, axis2=2) * moments.weight
    shared = np.square(moments.mean).sum(1) * moments.weight
    return float(shared.sum() / max(total.sum(), 1e-300))


def _outliers(moments: Moments) -> int:
    squares = np.diagonal(moments.raw, axis1=1, axis2=2)
    return int((squares > 10 * np.median(squares, axis=1, keepdims=True)).sum())


# --- formats ----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def noise(name: str, head_dim: int) -> float:
    """Expected squared error of a key or value format, relative to the vector's square.

    Args:
        name: ``"mse2"`` to ``"mse4"``, ``"fp8"``, or ``"int2"`` to ``"int8"``.
        head_dim: D; the range of an affine format grows with it.

    Returns:
        That of a vector whose coordinates are normal, as after a rotation.
    """
    if name == "fp8":
        return FP8_NOISE
    bits = int(name[-1])
    if name.startswith("mse"):
        # Norm correction leaves the angle: |u - c / |c||^2 = 2 - 2 cos, cos^2 = 1 - error.
        error = codebook.expected_error(codebook.default_centroids(bits, 1).astype(np.float64))
        return 2 - 2 * math.sqrt(1 - error)
    return (_normal_range(head_dim) / (2**bits - 1)) ** 2 / 12


@lru_cache(maxsize=64)
def _normal_range(count: int) -> float:
    """Root mean square of largest minus smallest of ``count`` normal numbers, nearly."""
    x = np.linspace(-9.0, 9.0, 3601)
    below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    # E[range] = integral of 1 - F^n - (1 - F)^n.
    return float((1 - below**count - (1 - below) ** count).sum() * (x[1] - x[0]))


@dataclass(frozen=True)
class LayerFit:
    """The fits of a layer's keys and values.

    Attributes:
        key, value: what they are coded with.
        key_scale: float64 ``[Hk]``, what the key transform is multiplied by, so that every format
            finds keys of one size.
    """

    key: Fit
    value: Fit
    key_scale: np.ndarray = field(repr=False)

    def codec(self, config: QuantConfig, head_dim: int, seed: int = 0) -> Codec:
        """The codec of a format.

        Args:
            config: the formats.
            head_dim: D.
            seed: chooses the rotation.
        """
        key = np.eye(head_dim)[None] if self.key.transform is None else self.key.transform
        codec = Codec(
            QuantConfig(key="mse4", value="mse4"),
            head_dim,
            seed=seed,
            key_offset=self.key.offset,
            value_offset=self.value.offset,
            key_transform=self.key_scale[:, None, None] * key,
            value_transform=self.value.transform,
        )
        return recode(codec, config)


def recode(codec: Codec, config: QuantConfig, seed: int | None = None) -> Codec:
    """The codec of another format with the same offsets and transforms.

    fp8 keys and affine values have no rotation of their own; theirs goes into the transform, so
    that what they round is isotropic, as a fit assumes. For fp8 keys the transform also has to
    bring keys to a size that the format holds, which that of a :class:`LayerFit` does.

    Args:
        codec: of one layer.
        config: the new formats.
        seed: chooses another rotation. Default: that of ``codec`` stays.
    """
    old = codec.config
    rotation = codec.rotation if seed is None else make_rotation(codec.head_dim, seed)

    def arranged(transform: np.ndarray | None, was: bool, now: bool) -> np.ndarray | None:
        # A transform that holds a rotation is as good as one that does not under another one.
        if now or not (was or seed is not None):
            return transform
        wide = rotation.astype(np.float64)
        return wide[None] if transform is None else wide @ transform

    return Codec(
        config,
        codec.head_dim,
        rotation=rotation,
        key_offset=codec.key_offset,
        value_offset=codec.value_offset,
        key_transform=arranged(codec.key_transform, old.key_is_codebook, config.key_is_codebook),
        value_transform=arranged(
            codec.value_transform, old.value_is_codebook, config.value_is_codebook
        ),
    )


def fit_layer(
    keys: tuple[Part, Part], values: tuple[Part, Part], shrinkages: Sequence[float] = SHRINKAGES
) -> LayerFit:
    """Fits a layer.

    Args:
        keys: fitting and held-out part of the keys.
        values: fitting and held-out part of the values.
        shrinkages: as in :func:`fit`.

    Raises:
        ValueError: too few tokens.
    """
    key = fit(*keys, shrinkages=shrinkages)
    value = fit(*values, shrinkages=shrinkages)
    whole = (keys[0] + keys[1]).coded
    coded = whole.raw if key.offset is None else whole.around(key.offset)
    metric = np.eye(coded.shape[-1])[None]
    if key.transform is not None:
        metric = key.transform.swapaxes(-1, -2) @ key.transform
    rms = np.sqrt((metric * coded).sum((-2, -1)) / coded.shape[-1])
    return LayerFit(key, value, np.where(rms > 0, KEY_SIZE / np.maximum(rms, 1e-12), 1.0))


# --- bits of each layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A format that a layer may have.

    Attributes:
        config: the format.
        size: bytes of a token and head.
        cost: what it costs in accuracy; costs of layers add.
    """

    config: QuantConfig
    size: int
    cost: float


def allocate(choices: Sequence[Sequence[Choice]], budget: float) -> list[Choice]:
    """The choice of each layer with the least total cost within a budget, exactly.

    Args:
        choices: of each layer.
        budget: bytes of a token and head, mean over the layers.

    Raises:
        ValueError: even the smallest choices are larger.
    """
    least = [min(choice.size for choice in layer) for layer in choices]
    total = math.floor(budget * len(choices) + 1e-9)
    if total < sum(least):
        raise ValueError(
            f"budget: expected at least {sum(least) / len(choices):.4g} bytes a token and head, "
            f"got {budget:.4g}"
        )
    # Dynamic programming over the bytes that are left beside the smallest choices.
    spare = total - sum(least)
    best = np.zeros(spare + 1)
    picks = []
    for layer, base in zip(choices, least, strict=True):
        costs = np.full((len(layer), spare + 1), np.inf)
        for number, choice in enumerate(layer):
            extra = choice.size - base
            if extra <= spare:
                costs[number, extra:] = best[: spare + 1 - extra] + choice.cost
        picks.append(costs.argmin(0))
        best = costs.min(0)
    result = []
    for layer, base, pick in zip(reversed(choices), reversed(least), reversed(picks), strict=True):
        choice = layer[pick[spare]]
        spare -= choice.size - base
        result.append(choice)
    return result[::-1]
