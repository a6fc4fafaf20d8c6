"""Bit equality of a sequence's result, whatever else is in the call; for the interpreter and GPUs.

Sequences and tokens are those of a case; each call takes some rows of some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import tq_torch
from tests.cases import PRESET_CONFIGS, AttentionCase, Extras
from tests.torch.helpers import attention_tensors, on_device

PLAN = {"deterministic": "batch"}


@dataclass(frozen=True)
class Part:
    """Rows ``[first, last)`` of the last rows of a sequence, in one call."""

    seq: int
    first: int
    last: int


class Batch:
    """The sequences of a case, each with query rows for its last tokens."""

    def __init__(self, case: AttentionCase, backend: str, device: str = "cpu") -> None:
        self.case, self.backend = case, backend
        self.tensors = on_device(attention_tensors(case), device)
        self.starts = self.tensors["query_start_loc"].tolist()
        self.lens = self.tensors["seq_lens"].tolist()

    def rows(self, seq: int) -> int:
        """Query rows of a sequence."""
        return int(self.starts[seq + 1] - self.starts[seq])

    def run(
        self, parts: Sequence[Part], *, decode: bool = False, permute: bool = False, **options: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Output and LSE of each part, all in one call; ``permute``: in other pages."""
        tensors, device = self.tensors, self.tensors["query"].device
        index = [
            torch.arange(self.starts[p.seq] + p.first, self.starts[p.seq] + p.last) for p in parts
        ]
        table = tensors["block_table"][[p.seq for p in parts]]
        cache = tensors["cache"]
        if permute:
            order = torch.randperm(len(cache), generator=torch.Generator().manual_seed(1))
            order = order.to(device)
            moved = torch.empty_like(cache)
            moved[order] = cache
            cache = moved
            table = torch.where(table >= 0, order.int()[table.long().clamp(min=0)], table)
        lens = torch.tensor(
            [self.lens[p.seq] - self.rows(p.seq) + p.last for p in parts], dtype=torch.int32
        )
        counts = torch.tensor([0, *(p.last - p.first for p in parts)])
        arrays: dict[str, Any] = {
            "query": tensors["query"][torch.cat(index).to(device)],
            "cache": cache,
            "block_table": table,
            "seq_lens": lens.to(device),
            "sinks": tensors["sinks"],
            "alibi_slopes": tensors["alibi_slopes"],
        }
        call = {**self.case.options, **options}
        function = tq_torch.decode_attention
        if not decode:
            function = tq_torch.attention
            arrays["query_start_loc"] = counts.cumsum(0).int().to(device)
        out, lse = function(**arrays, **call, return_lse=True, backend=self.backend)
        sizes = counts[1:].tolist()
        return list(zip(out.split(sizes), lse.split(sizes), strict=True))


def check_batch_invariance(
    case: AttentionCase, backend: str, device: str = "cpu", *, few: bool = False, **plan: int
) -> None:
    """The first sequence of a case has the same bits in every call that its rows can be in.

    ``few``: only some calls, each of several ways at once; ``plan``: further overrides.
    """
    batch = Batch(case, backend, device)
    rows = batch.rows(0)
    assert rows >= 8
    options = {"plan": {**PLAN, **plan}}
    whole = Part(0, 0, rows)
    ((want, want_lse),) = batch.run([whole], **options)
    assert bool(want.isfinite().all())

    def same(results: Sequence[tuple[torch.Tensor, torch.Tensor]], what: str) -> None:
        out, lse = (torch.cat(x) for x in zip(*results, strict=True))
        for name, a, b in (("out", out, want), ("lse", lse, want_lse)):
            differ = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
            assert not differ, f"{what}: {differ} bytes of {name} differ"

    others = [Part(s, 0, batch.rows(s)) for s in range(1, len(batch.lens))]
    one = [Part(0, i, i + 1) for i in range(rows)]
    tight = {**options, "max_seq_len": batch.lens[0]}
    first, *rest = (Part(0, a, b) for a, b in ((0, 3), (3, 8), (8, rows)) if a < b)
    alone = batch.run([first], **options)
    same(alone + batch.run([*others, *rest], **tight)[len(others) :], "in chunks, one in a batch")
    singles = [Part(p.seq, 0, 1) for p in others if p.last]
    together = batch.run([*singles, *one], decode=True, **options)
    same(together[len(singles) :], "rows as sequences of a decode")
    same(batch.run([*others, whole, others[0]], permute=True, **options)[-2:-1], "in other pages")
    if few:
        return
    same([batch.run([part], **options)[0] for part in one], "rows one at a time")
    same([batch.run([part], decode=True, **tight)[0] for part in one], "decodes one at a time")
    same(batch.run([whole, *others], **options)[:1], "first of a batch")
    same(batch.run([others[0], whole, whole, *others], **options)[2:3], "in a batch twice")
    same(batch.run([whole], max_query_len=rows, **tight), "with tight bounds")


#: Rows and tokens: a chunk whose rows end and begin, with a window of 130, in different tiles.
SHORT = ((9, 325), (1, 40), (3, 70), (2, 0))


def invariance_cases(batch: tuple[tuple[int, int], ...], num_kv_heads: int) -> list[AttentionCase]:
    """Formats and features with ``batch``, of which the first sequence is looked at."""
    config = PRESET_CONFIGS
    codec = Extras("heads", "heads", "heads", "heads")
    plain = AttentionCase(
        config["4bit"], 128, 16, num_kv_heads=num_kv_heads, dtype="float16", batch=batch
    )
    return [
        replace(plain, dtype="bfloat16"),
        replace(plain, config=config["3bit"], group=3, sinks=True),
        replace(plain, config=config["k8v4"], group=1, sliding_window=130, dtype="float32"),
        replace(plain, config=config["4bit_hq"], head_dim=64, page_size=64, softcap=20.0),
        replace(plain, group=8, sliding_window=40, sinks=True, alibi=True, extras=codec),
    ]
