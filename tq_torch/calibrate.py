"""What a transformers model shows of its keys, queries and values; needs transformers.

Packing moves the key or value of a token by ``d``. To second order that costs a KL divergence of
``E[(g . d)^2] / 2``, summed over all next tokens, where ``g`` is the gradient of ``u . logits`` for
random ``u`` with the covariance of a sampled next token, ``diag(p) - p p^T``. One backward pass
gives ``g`` for every token, layer and head. ``d`` is isotropic in the coded basis and as long as
the vector is there, so a transform ``T`` costs ``|T (k - mu)|^2 |T^-T g|^2``, and the best one has
a fixed point: that of keys weighted by ``|T^-T g|^2`` and gradients weighted by ``|T (k - mu)|^2``.
The first pass over the text starts at the identity; the second, at what the first one found.

An attention implementation of our own, registered through the public interface, is where keys and
values are observed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tq_torch
from tq_core import calibration
from tq_core.calibration import LayerFit, Moments, Part
from tq_core.codec import Codec
from tq_core.layout import CacheLayout

_names = (f"turboquant_calibration_{number}" for number in itertools.count())

Progress = Callable[[int], object]


def _nothing(count: int) -> None:
    """No progress is shown."""


class _Side:
    """Moments of the keys or the values of a layer over some windows."""

    def __init__(self, heads: int, dim: int, at: calibration.Fit | None) -> None:
        self.coded, self.gradients = Moments(heads, dim), Moments(heads, dim)
        self.at = at
        self.errors = np.zeros(heads)
        self.tokens = 0

    def add(self, vectors: Tensor, gradients: Tensor) -> None:
        """Adds ``[Hk, T, D]`` vectors and gradients of a window."""
        vectors, gradients = vectors.double(), gradients.double()
        metric, offset = _metric(self.at, vectors)
        away = vectors - offset
        lengths = ((away @ metric) * away).sum(-1)
        costs = ((gradients @ torch.linalg.inv(metric)) * gradients).sum(-1)
        _add(self.coded, vectors, costs)
        _add(self.gradients, gradients, lengths)
        self.errors += (costs * lengths).sum(1).cpu().numpy() / vectors.shape[-1]
        self.tokens += vectors.shape[1]

    def part(self) -> Part:
        """What is fitted to; its error is twice the KL divergence a token, per unit of noise."""
        offset = None if self.at is None else self.at.offset
        around = self.coded.raw if offset is None else self.coded.around(offset)
        transform = None if self.at is None else self.at.transform
        unit = calibration.isotropic_error(around, self.gradients.raw, transform)
        importance = self.errors / max(self.tokens, 1) / np.maximum(unit, 1e-300)
        return Part(self.coded, self.gradients, self.tokens, importance)


class _Sums:
    """What some windows showed of a layer."""

    def __init__(self, heads: int, dim: int, at: LayerFit | None) -> None:
        self.sides = _Side(heads, dim, at and at.key), _Side(heads, dim, at and at.value)
        #: Those of all tokens alike, for the errors of scores.
        self.keys, self.queries = Moments(heads, dim), Moments(heads, dim)


@dataclass(frozen=True)
class LayerResult:
    """What calibration found for a layer.

    Attributes:
        fit: offsets and transforms.
        key_divergence, value_divergence: expected KL divergence of the next-token distributions
            from the 16-bit ones when this layer alone is packed, nats, per unit of a format's
            noise.
        plain_key_divergence, plain_value_divergence: the same without offsets and transforms.
        score_error: expected mean squared error of a scaled score per unit of noise, over all
            pairs of a query and a key.
        plain_score_error: the same without offset and transform.
    """

    fit: LayerFit
    key_divergence: float
    value_divergence: float
    plain_key_divergence: float
    plain_value_divergence: float
    score_error: float
    plain_score_error: float


@dataclass(frozen=True)
class Check:
    """What packing did, measured with the packed bytes.

    Attributes:
        divergence: mean KL divergence of the next-token distributions from the 16-bit ones, nats,
            with all layers packed.
        score_errors: root mean square error of a scaled score in each layer, as in
            ``LayerResult``.
    """

    divergence: float
    score_errors: list[float]


@dataclass
class Calibrator:
    """Observes a model's attention.

    Args:
        model: a causal language model of transformers that runs its attention through
            ``AttentionInterface``.

    Example:
        >>> import torch, transformers
        >>> from tq_torch.calibrate import Calibrator
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=1,
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> tokens = torch.randint(64, (2048,), generator=torch.Generator().manual_seed(0))
        >>> layers = Calibrator(model).fit(list(tokens.split(512)))
        >>> len(layers), layers[0].key_divergence <= layers[0].plain_key_divergence
        (2, True)
    """

    model: Any
    #: Called with layer, query, key, value and scale; returns the key and value to attend to.
    _observe: Callable[..., tuple[Tensor, Tensor]] | None = field(default=None, init=False)
    _seen: set[int] = field(default_factory=set, init=False)

    def fit(
        self,
        windows: Sequence[Tensor],
        *,
        passes: int = 2,
        held_out_every: int = 4,
        seed: int = 0,
        progress: Progress = _nothing,
    ) -> list[LayerResult]:
        """Offsets and transforms of all layers.

        Args:
            windows: token ids ``[T]``, each a text of its own.
            passes: how often the text is read. 1 weights at the identity alone.
            held_out_every: every that many windows one is held out, the last one first.
            seed: of the random directions.
            progress: called with the number of tokens just read.

        Raises:
            ValueError: too few tokens, or a model whose attention cannot be observed.
        """
        held = [(len(windows) - 1 - n) % held_out_every == 0 for n in range(len(windows))]
        counts = [sum(len(w) for w, h in zip(windows, held, strict=True) if h == k) for k in (0, 1)]
        calibration.check_tokens(counts[0], counts[1], self._head_dim())
        reference: dict[int, LayerFit] = {}
        for _ in range(passes):
            generator = torch.Generator().manual_seed(seed)
            sums: list[dict[int, _Sums]] = [{}, {}]
            with self._attention():
                for window, part in zip(windows, held, strict=True):
                    self._add(window, sums[part], reference, generator)
                    progress(len(window))
            results = []
            for layer in sorted(sums[0]):
                found = [s[layer] for s in sums]
                keys, values = ([s.sides[n].part() for s in found] for n in (0, 1))
                reference[layer] = fitted = calibration.fit_layer(
                    (keys[0], keys[1]), (values[0], values[1])
                )
                key, value = keys[0] + keys[1], values[0] + values[1]
                pairs = Part(
                    found[0].keys + found[1].keys,
                    found[0].queries + found[1].queries,
                    key.tokens,
                    np.full(len(key.importance), self._scale**2 / len(key.importance)),
                )
                results.append(_result(fitted, key, value, pairs))
        return results

    def sample(
        self, count: int, length: int, *, seed: int = 0, progress: Progress = _nothing
    ) -> list[Tensor]:
        """Texts that the model writes itself, each after one random token.

        Args:
            count: of texts.
            length: tokens of each.
            seed: chooses the texts.
            progress: called with the number of tokens just written.
        """
        from transformers import DynamicCache

        generator = torch.Generator().manual_seed(seed)
        device = next(self.model.parameters()).device
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        # The cache's name from some version on; the older one then warns.
        parameters = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        cache = {name: DynamicCache(config=self.model.config)}
        written = [torch.randint(vocabulary, (count, 1), generator=generator)]
        with torch.inference_mode():
            while len(written) < length:
                logits = self.model(written[-1].to(device), use_cache=True, **cache).logits
                p = logits[:, -1].float().softmax(-1).cpu()
                written.append(torch.multinomial(p, 1, generator=generator))
                progress(count)
        return list(torch.cat(written, 1).clone())

    def check(
        self, window: Tensor, codecs: Sequence[Codec], *, progress: Progress = _nothing
    ) -> Check:
        """Packs all layers and measures what that does.

        Args:
            window: token ids ``[T]``.
            codecs: of each layer.
            progress: called with the number of tokens just read.
        """
        errors: dict[int, float] = {}

        def compare(
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> tuple[Tensor, Tensor]:
            back, _ = _round_trip(codecs[layer], key[0].float(), value[0].float())
            off = back - key[0].float()
            # What all tokens have in common changes nothing.
            off = off - off.mean(1, keepdim=True)
            rows = _grouped(query[0].float(), len(off))
            seen, moved = (x.mT @ x / x.shape[1] for x in (rows, off))
            errors[layer] = scale * float((seen * moved).sum() / len(off)) ** 0.5
            return key, value

        def pack(
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> tuple[Tensor, Tensor]:
            back = _round_trip(codecs[layer], key[0].float(), value[0].float())
            return back[0][None].to(key.dtype), back[1][None].to(value.dtype)

        found = []
        with self._attention(), torch.inference_mode():
            for observe in (compare, pack):
                self._observe = observe
                found.append(self._forward(window).float().log_softmax(-1))
                progress(len(window))
        exact, packed = found
        divergence = float((exact.exp() * (exact - packed)).sum(-1).mean())
        return Check(max(divergence, 0.0), [errors[layer] for layer in sorted(errors)])

    # --- the model --------------------------------------------------------------------------

    def _head_dim(self) -> int:
        text = self.model.config.get_text_config(decoder=True)
        explicit = getattr(text, "head_dim", None)
        return int(explicit or text.hidden_size // text.num_attention_heads)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The model runs :meth:`_attend` inside, and its parameters need no gradient."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = next(_names)
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        before = self.model.config._attn_implementation
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.model.set_attn_implementation(name)
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            self._observe = None
            for parameter in trained:
                parameter.requires_grad_(True)
            self.model.set_attn_implementation(before)

    def _forward(self, window: Tensor) -> Tensor:
        """Logits ``[T, V]``."""
        device = next(self.model.parameters()).device
        self._seen.clear()
        logits: Tensor = self.model(window[None].to(device), use_cache=False).logits[0]
        expected = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self._seen) != expected:
            raise ValueError(
                f"model: its attention could be observed in {len(self._seen)} of {expected} "
                "layers; models that run attention through transformers' AttentionInterface are "
                "supported"
            )
        return logits

    def _add(
        self,
        window: Tensor,
        sums: dict[int, _Sums],
        reference: dict[int, LayerFit],
        generator: torch.Generator,
    ) -> None:
        """Adds what a window shows of each layer."""
        vectors: list[tuple[int, Tensor, Tensor]] = []
        moves: list[Tensor] = []

        def observe(
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> tuple[Tensor, Tensor]:
            heads, _, dim = key[0].shape
            into = sums.setdefault(layer, _Sums(heads, dim, reference.get(layer)))
            rows = _grouped(query[0].detach(), heads)
            for moments, all_vectors in ((into.keys, key[0].detach()), (into.queries, rows)):
                wide = all_vectors.double()
                _add(moments, wide, torch.ones_like(wide[..., 0]))
            vectors.append((layer, key[0].detach(), value[0].detach()))
            moves.extend(torch.zeros_like(x, requires_grad=True) for x in (key, value))
            return key + moves[-2], value + moves[-1]

        self._observe = observe
        with torch.enable_grad():
            logits = self._forward(window)
        gradients = torch.autograd.grad(logits, moves, _directions(logits.detach(), generator))
        for number, (layer, *both) in enumerate(vectors):
            for n in (0, 1):
                sums[layer].sides[n].add(both[n], gradients[2 * number + n][0])

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Exact attention of ``[1, H, T, D]``, observed."""
        layer = int(module.layer_idx)
        self._seen.add(layer)
        if key.shape != value.shape:
            raise ValueError("model: values of another head_dim than the keys' are not supported")
        self._scale = scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._observe is not None:
            key, value = self._observe(layer, query, key, value, scale)
        if sliding_window is not None and sliding_window >= key.shape[2]:
            sliding_window = None
        if sliding_window is softcap is s_aux is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            settings = scale, sliding_window, softcap, s_aux
            # The scores are computed again in the backward pass rather than kept.
            out = checkpoint(_softmax_attention, query, key, value, *settings, use_reentrant=False)
        return out.transpose(1, 2), None


def _directions(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Random ``[T, V]`` whose rows have the covariance ``diag(p) - p p^T``."""
    p = logits.float().softmax(-1)
    signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p.device)
    u = p.sqrt() * (2 * signs - 1)
    return (u - p * u.sum(-1, keepdim=True)).to(logits.dtype)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function: there is no padding, and attention hides what is to be hidden."""


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with all that a model may ask for."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = scale * (query @ key.mT).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)[None]
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(-1, -1, query.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """Queries ``[Hq, T, D]`` by the KV head that they read, ``[Hk, group * T, D]``."""
    return query.unflatten(0, (kv_heads, -1)).flatten(1, 2)


def _round_trip(codec: Codec, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[Hk, T, D]`` as they come back from packed pages."""
    heads, count, dim = key.shape
    layout = CacheLayout(codec.config, heads, dim, 16)
    pages = -(-count // 16)
    cache = tq_torch.empty_cache(layout, pages, device=key.device)
    tq_torch.store(
        key.transpose(0, 1),
        value.transpose(0, 1),
        cache,
        torch.arange(count, device=key.device),
        layout=layout,
        codec=codec,
    )
    back = tq_torch.dequantize(
        cache,
        torch.arange(pages, dtype=torch.int32, device=key.device)[None],
        torch.tensor([count], dtype=torch.int32, device=key.device),
        layout=layout,
        codec=codec,
        dtype=torch.float32,
    )
    new_key, new_value = (x[0, :count].transpose(0, 1) for x in back)
    return new_key, new_value


def _metric(fit: calibration.Fit | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """``T^T T`` ``[Hk, D, D]`` and the offset ``[Hk, 1, D]`` of a fit, float64."""
    heads, _, dim = like.shape
    metric = torch.eye(dim, dtype=torch.float64, device=like.device).expand(heads, dim, dim)
    offset = torch.zeros(heads, 1, dim, dtype=torch.float64, device=like.device)
    if fit is not None and fit.transform is not None:
        metric = torch.from_numpy(fit.transform.swapaxes(1, 2) @ fit.transform).to(like.device)
    if fit is not None and fit.offset is not None:
        offset = torch.from_numpy(fit.offset).to(like.device)[:, None]
    return metric, offset


def _add(moments: Moments, vectors: Tensor, weights: Tensor) -> None:
    """Adds float64 ``[Hk, T, D]`` vectors with weights ``[Hk, T]``."""
    weighted = vectors * weights[..., None]
    sums = (weights.sum(1), weights.square().sum(1), weighted.sum(1), weighted.mT @ vectors)
    moments.add_sums(vectors.shape[1], *(x.cpu().numpy() for x in sums))


def _result(fitted: LayerFit, keys: Part, values: Part, pairs: Part) -> LayerResult:
    key, value = fitted.key, fitted.value
    return LayerResult(
        fitted,
        keys.error(key.offset, key.transform) / 2,
        values.error(value.offset, value.transform) / 2,
        keys.error(None, None) / 2,
        values.error(None, None) / 2,
        pairs.error(key.offset, key.transform),
        pairs.error(None, None),
    )
