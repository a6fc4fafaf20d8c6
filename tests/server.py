"""A simulated server over a packed cache, against the reference.

``python -m tests.server --steps 10000 [--seed N]``. Sequences come, grow, share, fork, shrink, move
between two caches and go; pages are used again at once, last freed first. After each step

* every byte of both caches is what it should be: stored tokens those of the reference, everything
  else as it was, what was freed 0xFF;
* some sequences are attended, and the results are those of the reference on the same tokens in
  pages of their own, gathered from a log that knows nothing of pages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.cases import (
    CONFIGS,
    DTYPES,
    PLAIN,
    AttentionCase,
    Extras,
    StoreInputs,
    Wanted,
    assert_near,
    assert_same_bytes,
    config_id,
    judge,
    rounded,
)
from tests.engines import Engine
from tq_core.layout import ORDERS

POISON = 0xFF
#: Tokens that fit the caches: a few sequences.
ROOM = (360, 200)
MOST_TOKENS = 120
#: Shapes of every call, so that JAX compiles one of each.
STORED, SEQS, ROWS = 32, 4, 16


class Full(Exception):
    """No page is free."""


@dataclass
class Sequence:
    """Tokens in pages of one of the caches; ``log``: the bytes of each."""

    cache: int
    pages: list[int] = field(default_factory=list)
    log: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))

    @property
    def length(self) -> int:
        return len(self.log)


class Server:
    """Two caches of one layout, their sequences, and what they should hold."""

    def __init__(self, case: AttentionCase, engine: Engine, seed: int) -> None:
        self.case, self.engine = case, engine
        self.layout = layout = case.layout
        self.rng = np.random.default_rng(seed)
        sizes = [-(-n // layout.page_size) + 2 for n in ROOM]
        self.mirrors = [np.full(layout.shape(n), POISON, np.uint8) for n in sizes]
        self.caches = [engine.array(m) for m in self.mirrors]
        self.free = [list(range(n)) for n in sizes]
        self.uses = [Counter[int]() for _ in sizes]
        self.seqs: list[Sequence] = []
        self.done: Counter[str] = Counter()
        size = layout.page_size
        meta = layout.meta_index()
        parts = (layout.key_index(), layout.value_index(), meta, meta + 1)
        #: Where the bytes of each slot lie in a page, [P, bytes of a token].
        self.places = np.concatenate([p.reshape(size, -1) for p in parts], 1)

    # --- pages ----------------------------------------------------------------------------

    def _take(self, cache: int) -> int:
        if not self.free[cache]:
            raise Full
        page = self.free[cache].pop()
        self.uses[cache][page] = 1
        return page

    def _drop(self, cache: int, page: int) -> None:
        self.uses[cache][page] -= 1
        if not self.uses[cache][page]:
            self.free[cache].append(page)
            self.mirrors[cache][page] = POISON

    def _upload(self, cache: int) -> None:
        """Copies and poison go into the cache as bytes."""
        if self.engine.framework == "torch":
            self.caches[cache].copy_(self.engine.array(self.mirrors[cache]))
        else:
            self.caches[cache] = self.engine.array(self.mirrors[cache])

    def _own(self, seq: Sequence, index: int) -> None:
        """A page that others use too is copied before it is written."""
        page = seq.pages[index]
        if self.uses[seq.cache][page] > 1:
            new = self._take(seq.cache)
            self.mirrors[seq.cache][new] = self.mirrors[seq.cache][page]
            self._drop(seq.cache, page)
            seq.pages[index] = new
            self.done["pages copied on write"] += 1

    def _shorten(self, seq: Sequence) -> None:
        """Pages past its tokens go; a store that found no room for all of them may leave some."""
        needed = -(-seq.length // self.layout.page_size)
        for page in seq.pages[needed:]:
            self._drop(seq.cache, page)
        seq.pages = seq.pages[:needed]

    # --- steps ----------------------------------------------------------------------------

    def step(self) -> None:
        """One random operation, and the checks."""
        steps = {
            self.allocate: 3, self.append: 8, self.share: 2, self.fork: 2, self.evict: 1,
            self.crop: 2, self.move: 2,
        }  # fmt: skip
        weights = np.array(list(steps.values()), float)
        chosen = list(steps)[self.rng.choice(len(steps), p=weights / weights.sum())]
        if not self.seqs:
            chosen = self.allocate
        try:
            chosen()
            self.done[chosen.__name__] += 1
        except Full:
            self.done["evicted for room"] += 1
            for seq in self.seqs:
                self._shorten(seq)
            self.evict()
            self._upload(0)
            self._upload(1)
        self.check_bytes()
        count = int(self.rng.integers(1, SEQS + 1))
        for cache in range(2):
            here = [s for s in self.seqs if s.cache == cache]
            if here:
                picked = self.rng.permutation(len(here))[:count]
                self.attend(cache, [here[i] for i in picked])

    def _pick(self, cache: int | None = None) -> Sequence:
        some = [s for s in self.seqs if cache is None or s.cache == cache]
        return some[self.rng.integers(len(some))]

    def allocate(self) -> None:
        """A prompt, stored in chunks."""
        seq = Sequence(0, log=np.zeros((0, self.places.shape[1]), np.uint8))
        self.seqs.append(seq)
        self._grow([(seq, int(self.rng.integers(1, 60)))])

    def append(self) -> None:
        """A few tokens of several sequences in one store: a decode, or drafts."""
        cache = self._pick().cache
        here = [s for s in self.seqs if s.cache == cache and s.length < MOST_TOKENS]
        here = [here[i] for i in self.rng.permutation(len(here))[:SEQS]]
        self._grow([(s, int(self.rng.integers(1, 5))) for s in here])

    def share(self) -> None:
        """A new sequence begins with whole pages of another, and goes on alone."""
        old = self._pick()
        whole = int(self.rng.integers(0, old.length // self.layout.page_size + 1))
        pages = old.pages[:whole]
        self.uses[old.cache].update(pages)
        seq = Sequence(old.cache, pages, old.log[: whole * self.layout.page_size])
        self.seqs.append(seq)
        self._grow([(seq, int(self.rng.integers(1, 20)))])

    def fork(self) -> None:
        """The same tokens twice, in the same pages, the last one not full."""
        old = self._pick()
        self.uses[old.cache].update(old.pages)
        self.seqs.append(replace(old, pages=list(old.pages)))

    def evict(self) -> None:
        """A sequence goes; pages that nobody else uses are poisoned."""
        if self.seqs:
            self._evict(self._pick())

    def _evict(self, seq: Sequence) -> None:
        self.seqs = [s for s in self.seqs if s is not seq]
        for page in seq.pages:
            self._drop(seq.cache, page)
        self._upload(seq.cache)

    def crop(self) -> None:
        """The last tokens are forgotten, and poisoned where the page is not shared."""
        seq, size = self._pick(), self.layout.page_size
        seq.log = seq.log[: int(self.rng.integers(0, seq.length + 1))]
        self._shorten(seq)
        if seq.length % size and self.uses[seq.cache][seq.pages[-1]] == 1:
            page = self.mirrors[seq.cache][seq.pages[-1]].reshape(-1)
            page[self.places[seq.length % size :]] = POISON
        self._upload(seq.cache)

    def move(self) -> None:
        """All pages of a sequence go to the other cache, in other places, as bytes."""
        seq = self._pick()
        other = 1 - seq.cache
        if len(self.free[other]) < len(seq.pages):
            raise Full
        pages = [self._take(other) for _ in seq.pages]
        self.mirrors[other][pages] = self.mirrors[seq.cache][seq.pages]
        for page in seq.pages:
            self._drop(seq.cache, page)
        seq.cache, seq.pages = other, pages
        self._upload(0)
        self._upload(1)

    def _grow(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Stores new tokens of sequences of one cache, at most ``STORED`` in a call."""
        left = [(seq, min(n, MOST_TOKENS - seq.length)) for seq, n in wanted]
        while left:
            call, room = [], STORED
            for seq, n in left:
                if n > 0 and room:
                    call.append((seq, min(n, room)))
                    room -= call[-1][1]
            left = [(s, n - sum(m for t, m in call if t is s)) for s, n in left]
            left = [(s, n) for s, n in left if n > 0]
            if call:
                self._store(call)

    def _store(self, call: list[tuple[Sequence, int]]) -> None:
        case, size, cache = self.case, self.layout.page_size, call[0][0].cache
        slots = np.full(STORED, -1, np.int64)
        places: list[tuple[Sequence, np.ndarray]] = []
        copies = self.done["pages copied on write"]
        for seq, n in call:
            position = seq.length + np.arange(n)
            if seq.length % size:
                self._own(seq, seq.length // size)
            while len(seq.pages) * size < seq.length + n:
                seq.pages.append(self._take(cache))
            pages = np.array(seq.pages)[position // size]
            places.append((seq, pages * size + position % size))
        if self.done["pages copied on write"] != copies:
            self._upload(cache)
        rows = self.rng.permutation(STORED)
        every = np.concatenate([s for _, s in places])
        slots[rows[: len(every)]] = every
        shape = (2, STORED, case.num_kv_heads, case.head_dim)
        key, value = rounded(self.rng.normal(size=shape), case.dtype)
        what = {"layout": self.layout, "codec": case.codec}
        self.caches[cache] = self.engine.store(
            key, value, self.caches[cache], slots, **what, dtype=case.dtype
        )
        actual = np.array(self.engine.numbers(self.caches[cache]))
        inputs = StoreInputs(key, value, self.mirrors[cache], slots)
        assert_same_bytes(actual, inputs, **what)
        self.mirrors[cache] = actual
        flat = actual.reshape(len(actual), -1)
        for seq, at in places:
            tokens = flat[(at // size)[:, None], self.places[at % size]]
            seq.log = np.concatenate([seq.log, tokens])
        self.done["tokens stored"] += len(every)

    # --- checks ---------------------------------------------------------------------------

    def check_bytes(self) -> None:
        """Both caches are as expected, and so are the tokens of every sequence."""
        size = self.layout.page_size
        for cache, mirror in zip(self.caches, self.mirrors, strict=True):
            assert np.array_equal(self.engine.numbers(cache), mirror)
        for number, mirror in enumerate(self.mirrors):
            assert (mirror[self.free[number]] == POISON).all()
        for seq in self.seqs:
            j = np.arange(seq.length)
            flat = self.mirrors[seq.cache].reshape(len(self.mirrors[seq.cache]), -1)
            pages = np.array(seq.pages, int)[j // size]
            assert np.array_equal(flat[pages[:, None], self.places[j % size]], seq.log)

    def attend(self, cache: int, seqs: list[Sequence]) -> None:
        """A few rows of each sequence, or one, or none; the rest of the shape is padding."""
        case, size = self.case, self.layout.page_size
        rows = [int(n) for n in self.rng.integers(0, ROWS // SEQS + 1, len(seqs))]
        lens = np.zeros(SEQS, np.int32)
        lens[: len(seqs)] = [s.length for s in seqs]
        width = -(-MOST_TOKENS // size)
        table = np.full((SEQS, width), -1, np.int32)
        own = np.full((SEQS, width), -1, np.int32)
        clean = np.full(self.layout.shape(SEQS * width), POISON, np.uint8)
        flat = clean.reshape(len(clean), -1)
        for b, seq in enumerate(seqs):
            table[b, : len(seq.pages)] = seq.pages
            own[b, : len(seq.pages)] = b * width + np.arange(len(seq.pages))
            j = np.arange(seq.length)
            flat[(b * width + j // size)[:, None], self.places[j % size]] = seq.log
            if case.sliding_window is not None:
                gone = max(0, seq.length - rows[b] - case.sliding_window + 1) // size
                table[b, :gone] = -1
        starts = np.zeros(SEQS + 1, np.int32)
        starts[1 : len(seqs) + 1] = np.cumsum(rows)
        starts[len(seqs) + 1 :] = sum(rows)
        query = rounded(self.rng.normal(size=(ROWS, case.num_query_heads, case.head_dim)),
                        case.dtype)  # fmt: skip
        sinks = self.rng.normal(size=case.num_query_heads).astype(np.float32)
        slopes = 2.0 ** -np.linspace(1, 8, case.num_query_heads)
        call: dict[str, Any] = {
            "query": query, "seq_lens": lens, "query_start_loc": starts,
            "sinks": sinks if case.sinks else None,
            "alibi_slopes": slopes.astype(np.float32) if case.alibi else None,
        }  # fmt: skip
        wanted: Wanted = judge({**call, "cache": clean, "block_table": own}, **case.options)
        out, lse = self.engine.attention(
            {**call, "cache": self.caches[cache], "block_table": table}, case.dtype, **case.options
        )
        out, lse = self.engine.numbers(out), self.engine.numbers(lse)
        if self.engine.backend == "interpret" and case.dtype == "bfloat16":
            out = out * (1 + 2.0**-9)  # see tests/property/checks.py
        assert_near(out, lse, wanted, case.dtype)
        self.done["calls of attention"] += 1
        self.done["rows attended"] += sum(rows)


def shapes(engine: Engine) -> list[AttentionCase]:
    """What a server may serve: every pair of formats, features in turn."""
    cases = []
    extras = (PLAIN, PLAIN, Extras("heads", "shared"), Extras(value_transform="heads"))
    for i, config in enumerate(CONFIGS):
        cases.append(
            AttentionCase(
                config,
                (64, 40, 72, 8, 128)[i % 5],
                (16, 5, 1, 32)[i % 4],
                ORDERS[i % 3],
                num_kv_heads=1 + i % 2,
                group=(1, 4, 3)[i % 3],
                dtype=DTYPES[i // 2 % 3],
                sliding_window=(None, 20, None, 7)[i // 3 % 4],
                softcap=(None, None, 20.0)[i // 4 % 3],
                sinks=i % 3 == 1,
                alibi=i % 5 == 2,
                extras=extras[i % 4],
            )
        )
    return [c for c in cases if engine.serves(c.head_dim)]


def serve(
    engine: Engine, steps: int, seed: int = 0, servers: int = 1, *, log: bool = False
) -> Counter[str]:
    """Runs servers of different shapes, each for its share of ``steps``; gives what was done."""
    done: Counter[str] = Counter()
    every = shapes(engine)
    for i in range(servers):
        case = every[(seed + i * 11) % len(every)]  # 11: all of the 35 formats in turn
        server = Server(case, engine, seed * 1000 + i)
        start, count = time.time(), steps // servers + (i < steps % servers)
        for number in range(count):
            try:
                server.step()
            except Exception as error:
                error.add_note(f"server {i}, step {number} of seed {seed}: {case}")
                raise
        done += server.done
        done[f"steps with {config_id(case.config)}"] += count
        if log:
            print(f"{engine} {case}: {count} steps, {time.time() - start:.0f} s", flush=True)
    return done


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server", description=__doc__)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--framework", choices=["torch", "jax"], default="torch")
    parser.add_argument("--backend", choices=["native", "interpret", "triton"], default="native")
    parser.add_argument("--servers", type=int, default=35, help="one after another")
    args = parser.parse_args(words)
    if args.backend == "interpret":
        import os
        import warnings

        os.environ["TRITON_INTERPRET"] = "1"
        warnings.simplefilter("ignore", RuntimeWarning)
        from tests.interpret.speed import patch_the_language_once

        patch_the_language_once()
    device = "cuda" if args.backend == "triton" else "cpu"
    engine = Engine(args.framework, args.backend, device)
    done = serve(engine, args.steps, args.seed, args.servers, log=True)
    for name, count in sorted(done.items()):
        print(f"  {name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
