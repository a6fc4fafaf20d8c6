"""What a transformers model shows of its keys, queries and values; needs transformers.

An attention implementation of our own, registered through the public interface, computes exact
attention and sums moments as it goes: no activation is kept beyond its layer. Errors of scores
count by what they do to the layer's output. A score of row ``i`` and token ``j`` that is off by
``d`` moves the output by ``p_ij d Wo (v_j - o_i)``, so that is the weight of the pair:
``w_ij = p_ij^2 |Wo (v_j - o_i)|^2``. The transform of least weighted error has a fixed point: that
of keys weighted by ``sum_i w_ij |T^-T q_i|^2`` and queries weighted by
``sum_j w_ij |T (k_j - mu)|^2``. The first pass starts at the identity; the second, at what the
first one found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tq_torch
from tq_core import calibration
from tq_core.calibration import LayerFit, Moments, Part
from tq_core.codec import Codec
from tq_core.layout import CacheLayout

#: Names under which models keep the projection that follows attention.
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")
#: Query rows whose scores exist at a time.
_ROWS = 512

_names = (f"turboquant_calibration_{number}" for number in itertools.count())

Progress = Callable[[int], object]


def _nothing(count: int) -> None:
    """No progress is shown."""


@dataclass
class _Sums:
    """Moments of a layer over some windows, and the errors at the reference transforms."""

    keys: Moments
    queries: Moments
    values: Moments
    outputs: Moments
    key_errors: np.ndarray
    value_errors: np.ndarray
    tokens: int = 0
    #: Sum of all ``w_ij`` and of ``|Wo o_i|^2``, to state errors relative to.
    weight: float = 0.0
    energy: float = 0.0

    @classmethod
    def empty(cls, heads: int, dim: int) -> _Sums:
        moments = [Moments(heads, dim) for _ in range(4)]
        return cls(*moments, np.zeros(heads), np.zeros(heads))

    def parts(self, reference: LayerFit | None) -> tuple[Part, Part]:
        """What keys and values are fitted to."""
        key = _part(
            self.keys, self.queries, self.key_errors, self.tokens, reference and reference.key
        )
        value = _part(
            self.values,
            self.outputs,
            self.value_errors,
            self.tokens,
            reference and reference.value,
        )
        return key, value


def _part(
    coded: Moments, read: Moments, errors: np.ndarray, tokens: int, at: calibration.Fit | None
) -> Part:
    around = coded.raw if at is None or at.offset is None else coded.around(at.offset)
    unit = calibration.isotropic_error(around, read.raw, None if at is None else at.transform)
    importance = errors / max(tokens, 1) / np.maximum(unit, 1e-300)
    return Part(coded, read, tokens, importance)


@dataclass(frozen=True)
class LayerResult:
    """What calibration found for a layer.

    Attributes:
        fit: offsets and transforms.
        key_error, value_error: expected squared error of an output row, per unit of a format's
            noise, relative to the output's energy.
        plain_key_error, plain_value_error: the same without offsets and transforms.
        score_error: expected mean squared error of a scaled score per unit of noise, of a pair of
            row and token weighted by what it does to the output.
        plain_score_error: the same without offset and transform.
    """

    fit: LayerFit
    key_error: float
    value_error: float
    plain_key_error: float
    plain_value_error: float
    score_error: float
    plain_score_error: float


@dataclass(frozen=True)
class Probe:
    """What packing one layer did, measured with the packed bytes.

    Attributes:
        divergence: mean KL divergence of the next-token distributions from the 16-bit ones, nats.
        score_error: root mean square error of a scaled score, weighted as in ``LayerResult``.
    """

    divergence: float
    score_error: float


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
        >>> len(layers), layers[0].key_error <= layers[0].plain_key_error
        (2, True)
    """

    model: Any
    _sums: dict[int, _Sums] | None = field(default=None, init=False)
    _reference: dict[int, LayerFit] = field(default_factory=dict, init=False)
    _outputs: dict[int, Tensor] = field(default_factory=dict, init=False)
    _packed: tuple[int, Codec, bool, bool] | None = field(default=None, init=False)
    _measured: float = field(default=0.0, init=False)
    _seen: set[int] = field(default_factory=set, init=False)

    def fit(
        self,
        windows: Sequence[Tensor],
        *,
        passes: int = 2,
        held_out_every: int = 4,
        progress: Progress = _nothing,
    ) -> list[LayerResult]:
        """Offsets and transforms of all layers.

        Args:
            windows: token ids ``[T]``, each a text of its own.
            passes: how often the text is read. 1 weights at the identity alone.
            held_out_every: every that many windows one is held out, the last one first.
            progress: called with the number of tokens just read.

        Raises:
            ValueError: too few tokens, or a model whose attention cannot be observed.
        """
        held = [(len(windows) - 1 - n) % held_out_every == 0 for n in range(len(windows))]
        counts = [sum(len(w) for w, h in zip(windows, held, strict=True) if h == k) for k in (0, 1)]
        calibration.check_tokens(counts[0], counts[1], self._head_dim())
        self._reference = {}
        for number in range(passes):
            sums: list[dict[int, _Sums]] = [{}, {}]
            with self._attention():
                for window, part in zip(windows, held, strict=True):
                    self._sums = sums[part]
                    self._forward(window)
                    progress(len(window))
            self._sums = None
            results = {}
            for layer in sorted(sums[0]):
                at = self._reference.get(layer)
                parts = [s[layer].parts(at) for s in sums]
                keys, values = ((parts[0][n], parts[1][n]) for n in (0, 1))
                fitted = calibration.fit_layer(keys, values)
                results[layer] = _result(fitted, keys[1], values[1], sums[1][layer], self._scale)
                if number + 1 < passes:
                    self._reference[layer] = fitted
        return [results[layer] for layer in sorted(results)]

    def probe(
        self,
        window: Tensor,
        codecs: Sequence[Codec],
        *,
        keys: bool = True,
        values: bool = True,
        progress: Progress = _nothing,
    ) -> list[Probe]:
        """Packs one layer after the other and measures what that does.

        Args:
            window: token ids ``[T]``.
            codecs: of each layer.
            keys, values: which of the two are packed.
            progress: called with the number of tokens just read.
        """
        with self._attention():
            exact = self._log_probabilities(window)
            progress(len(window))
            result = []
            for layer, codec in enumerate(codecs):
                self._packed, self._measured = (layer, codec, keys, values), 0.0
                try:
                    packed = self._log_probabilities(window)
                finally:
                    self._packed = None
                divergence = (exact.exp() * (exact - packed)).sum(-1).mean()
                result.append(Probe(max(float(divergence), 0.0), self._measured))
                progress(len(window))
        return result

    # --- the model --------------------------------------------------------------------------

    def _head_dim(self) -> int:
        text = self.model.config.get_text_config(decoder=True)
        explicit = getattr(text, "head_dim", None)
        return int(explicit or text.hidden_size // text.num_attention_heads)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The model runs :meth:`_attend` inside."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = next(_names)
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        config = self.model.config
        before = config._attn_implementation
        self.model.set_attn_implementation(name)
        self._seen = set()
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _forward(self, window: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            self._seen.clear()
            logits = self.model(window[None].to(device), use_cache=False).logits[0]
        expected = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self._seen) != expected:
            raise ValueError(
                f"model: its attention could be observed in {len(self._seen)} of {expected} "
                "layers; models that run attention through transformers' AttentionInterface are "
                "supported"
            )
        return logits

    def _log_probabilities(self, window: Tensor) -> Tensor:
        return self._forward(window).float().log_softmax(-1)

    def _output_moments(self, module: Any, layer: int, heads: int, dim: int) -> Tensor:
        """``Wo^T Wo`` of each query head, float32 ``[Hq, D, D]``."""
        if layer not in self._outputs:
            weight = None
            for name in _OUTPUT_NAMES:
                found = getattr(getattr(module, name, None), "weight", None)
                if found is not None and found.ndim == 2 and heads * dim in found.shape:
                    # Linear layers have [out, in]; GPT-2's Conv1D the other way round.
                    weight = found if found.shape[1] == heads * dim else found.T
                    break
            if weight is None:
                eye = torch.eye(dim, device=next(self.model.parameters()).device)
                self._outputs[layer] = eye.expand(heads, dim, dim)
            else:
                split = weight.detach().float().unflatten(1, (heads, dim))
                self._outputs[layer] = torch.einsum("whd,whe->hde", split, split)
        return self._outputs[layer]

    # --- attention --------------------------------------------------------------------------

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
        """Exact attention of ``[1, H, T, D]``, with what is observed on the way."""
        layer = int(module.layer_idx)
        self._seen.add(layer)
        if key.shape != value.shape:
            raise ValueError("model: values of another head_dim than the keys' are not supported")
        q, k, v = (x[0].float() for x in (query, key, value))
        heads, _, dim = q.shape
        scale = dim**-0.5 if scaling is None else scaling
        self._scale = scale
        exact = k, v
        packed = self._packed is not None and self._packed[0] == layer
        if packed:
            k, v = self._round_trip(k, v)
        outputs = self._output_moments(module, layer, heads, dim)
        observed = None
        if packed or self._sums is not None:
            observed = _Observation(self, layer, exact, outputs)
        group = heads // len(k)
        result = torch.empty_like(q)
        for head in range(heads):
            mine = head // group
            for rows in torch.arange(q.shape[1], device=q.device).split(_ROWS):
                part = q[head, rows]
                scores, slope = _scores(part, k[mine], rows, scale, softcap, sliding_window)
                p = _softmax(scores, None if s_aux is None else s_aux[head].float())
                result[head, rows] = out = p @ v[mine]
                if self._sums is not None and observed is not None:
                    observed.add(head, mine, part, p, out, slope)
                elif packed and observed is not None:
                    original, slope = _scores(
                        part, exact[0][mine], rows, scale, softcap, sliding_window
                    )
                    p = _softmax(original, None if s_aux is None else s_aux[head].float())
                    observed.measure(head, mine, part, p, p @ exact[1][mine], slope, k[mine])
        if observed is not None:
            observed.finish()
        return result.transpose(0, 1)[None].to(query.dtype), None

    def _round_trip(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[Hk, T, D]`` as they come back from packed pages."""
        assert self._packed is not None
        _, codec, keys, values = self._packed
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
        new_key, new_value = tq_torch.dequantize(
            cache,
            torch.arange(pages, dtype=torch.int32, device=key.device)[None],
            torch.tensor([count], dtype=torch.int32, device=key.device),
            layout=layout,
            codec=codec,
            dtype=torch.float32,
        )
        back = (x[0, :count].transpose(0, 1) for x in (new_key, new_value))
        new_key, new_value = back
        return (new_key if keys else key), (new_value if values else value)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function: there is no padding, and :func:`_scores` hides what is to be hidden."""


def _scores(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[rows, T]`` with -inf where a token is hidden, and the softcap's slope."""
    scores, slope = scale * (query @ key.T), None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent.square()
    columns = torch.arange(len(key), device=key.device)
    hidden = columns[None] > rows[:, None]
    if window is not None:
        hidden |= columns[None] <= rows[:, None] - window
    return scores.masked_fill(hidden, -torch.inf), slope


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return scores.softmax(-1)
    column = sink.expand(len(scores), 1)
    return torch.cat([scores, column], -1).softmax(-1)[:, :-1]


class _Observation:
    """Sums of one layer over one window."""

    def __init__(
        self, calibrator: Calibrator, layer: int, exact: tuple[Tensor, Tensor], outputs: Tensor
    ) -> None:
        self.calibrator = calibrator
        self.key, self.value = exact
        self.outputs = outputs
        heads, count, dim = self.key.shape
        reference = calibrator._reference.get(layer)
        device = self.key.device
        self.key_metric, self.key_offset = _metric(reference and reference.key, heads, dim, device)
        self.value_metric, self.value_offset = _metric(
            reference and reference.value, heads, dim, device
        )
        self.inverse = torch.linalg.inv(self.key_metric)
        self.value_inverse = torch.linalg.inv(self.value_metric)
        key, value = self.key - self.key_offset, self.value - self.value_offset
        self.key_length = ((key @ self.key_metric) * key).sum(-1)  # [Hk, T]
        self.value_length = ((value @ self.value_metric) * value).sum(-1)
        self.key_weight = torch.zeros(heads, count, device=device)
        self.value_weight = torch.zeros(heads, count, device=device)
        self.weight = self.energy = self.error = 0.0
        self.sums: _Sums | None = None
        if calibrator._sums is not None:
            self.sums = calibrator._sums.setdefault(layer, _Sums.empty(heads, dim))
            self.sums.tokens += count
            self.query_sums = _zeros(heads, dim, device)
            self.output_sums = _zeros(heads, dim, device)

    def pairs(self, head: int, mine: int, p: Tensor, out: Tensor, slope: Tensor | None) -> Tensor:
        """``w_ij``: squared change of the output per squared change of a score."""
        metric, value = self.outputs[head], self.value[mine]
        turned = out @ metric
        away = (
            ((value @ metric) * value).sum(-1)[None]
            + (turned * out).sum(-1)[:, None]
            - 2 * turned @ value.T
        )
        self.energy += float((turned * out).sum())
        weights = p.square() * away.clamp_min(0)
        if slope is not None:
            weights = weights * slope.square()
        self.weight += float(weights.sum())
        return weights

    def add(
        self, head: int, mine: int, query: Tensor, p: Tensor, out: Tensor, slope: Tensor | None
    ) -> None:
        """Adds the rows of a query head."""
        weights = self.pairs(head, mine, p, out, slope)
        seen = ((query @ self.inverse[mine]) * query).sum(-1)
        self.key_weight[mine] += seen @ weights
        _accumulate(self.query_sums, mine, query, weights @ self.key_length[mine])
        mass = p.square().sum(0)
        read = float((self.value_inverse[mine] * self.outputs[head]).sum())
        self.value_weight[mine] += mass * read
        worth = float(mass @ self.value_length[mine])
        self.output_sums[0][mine] += worth
        self.output_sums[1][mine] += worth**2
        self.output_sums[3][mine] += worth * self.outputs[head].double()

    def measure(
        self,
        head: int,
        mine: int,
        query: Tensor,
        p: Tensor,
        out: Tensor,
        slope: Tensor | None,
        packed: Tensor,
    ) -> None:
        """Adds the errors of scores of rows of a query head."""
        weights = self.pairs(head, mine, p, out, slope)
        off = self.calibrator._scale * (query @ (packed - self.key[mine]).T)
        # What all tokens of a row have in common changes nothing.
        off = off - (p * off).sum(-1, keepdim=True)
        self.error += float((weights * off.square()).sum())

    def finish(self) -> None:
        """Hands the sums over."""
        if self.sums is None:
            self.calibrator._measured = (self.error / max(self.weight, 1e-300)) ** 0.5
            return
        heads, dim = self.key.shape[0], self.key.shape[2]
        count = self.key.shape[1]
        for moments, vectors, weights in (
            (self.sums.keys, self.key, self.key_weight),
            (self.sums.values, self.value, self.value_weight),
        ):
            totals = _zeros(heads, dim, self.key.device)
            for head in range(heads):
                _accumulate(totals, head, vectors[head], weights[head])
            moments.add_sums(count, *(t.cpu().numpy() for t in totals))
        self.sums.queries.add_sums(count, *(t.cpu().numpy() for t in self.query_sums))
        self.sums.outputs.add_sums(count, *(t.cpu().numpy() for t in self.output_sums))
        for total, weights, lengths in (
            (self.sums.key_errors, self.key_weight, self.key_length),
            (self.sums.value_errors, self.value_weight, self.value_length),
        ):
            total += (weights * lengths).sum(1).double().cpu().numpy() / dim
        self.sums.weight += self.weight
        self.sums.energy += self.energy


def _metric(
    fit: calibration.Fit | None, heads: int, dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``T^T T`` float32 ``[Hk, D, D]`` and the offset ``[Hk, 1, D]`` of a fit."""
    metric = torch.eye(dim, device=device).expand(heads, dim, dim)
    offset = torch.zeros(heads, 1, dim, device=device)
    if fit is not None and fit.transform is not None:
        array = fit.transform.swapaxes(1, 2) @ fit.transform
        metric = torch.from_numpy(array).float().to(device)
    if fit is not None and fit.offset is not None:
        offset = torch.from_numpy(fit.offset).float().to(device)[:, None]
    return metric, offset


def _zeros(heads: int, dim: int, device: torch.device) -> list[Tensor]:
    """Sums for ``Moments.add_sums``: weight, its square, first and second moments."""
    shapes = ((heads,), (heads,), (heads, dim), (heads, dim, dim))
    return [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]


def _accumulate(sums: list[Tensor], head: int, vectors: Tensor, weights: Tensor) -> None:
    vectors, weights = vectors.double(), weights.double()
    weighted = vectors * weights[:, None]
    sums[0][head] += weights.sum()
    sums[1][head] += weights.square().sum()
    sums[2][head] += weighted.sum(0)
    sums[3][head] += weighted.T @ vectors


def _result(fitted: LayerFit, keys: Part, values: Part, sums: _Sums, scale: float) -> LayerResult:
    """Errors on the held-out tokens, whose parts and sums these are."""
    energy = max(sums.energy / max(sums.tokens, 1), 1e-300)
    weight = max(sums.weight / max(sums.tokens, 1), 1e-300)
    key, plain_key = keys.error(fitted.key.offset, fitted.key.transform), keys.error(None, None)
    value = values.error(fitted.value.offset, fitted.value.transform)
    # A part's error is that of unscaled scores.
    square = scale**2
    return LayerResult(
        fitted,
        square * key / energy,
        value / energy,
        square * plain_key / energy,
        values.error(None, None) / energy,
        square * key / weight,
        square * plain_key / weight,
    )
