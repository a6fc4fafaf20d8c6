"""How many sequences the memory holds beside the weights, for ``bench model --fit``.

Memory is asked for, not calculated: a step is captured over one layer's cache, used by all layers,
and what the device then has less, the cache aside, is what a step needs. The largest batch follows
from what is left, and is run; where it does not fit after all, fewer sequences are tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench import gpu, model

#: Bytes that are left over.
MARGIN = 2**28
#: What a step is thought to need before it is measured.
FIRST_GUESS = 2**30
MOST_TRIES = 5
#: Part of a batch that did not fit that the next one has less.
LESS = 0.03


def free_bytes() -> int:
    """What the device has left when nothing is kept that nobody holds."""
    model.clean()
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def weight_bytes(config: model.Config) -> int:
    """Of the model."""
    rows = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.width * (rows + 3 * config.mlp)
    return 2 * (config.layers * layer + 2 * config.vocab * config.width)


def sequence_bytes(job: model.Job) -> int:
    """What a sequence takes in all layers, to the end of its last page."""
    if not job.preset:
        return job.cache_bytes // job.shape.B
    pages = -(-job.shape.L // job.page_size)
    return job.config.layers * pages * int(job.layout.page_bytes)


def with_batch(job: model.Job, batch: int) -> model.Job:
    """The job with another number of sequences."""
    return job._replace(shape=job.shape._replace(B=batch))


def needed(made: model.Model, job: model.Job, peers: Mapping[SDPBackend, str]) -> int:
    """Bytes of a step beside weights and caches: activations, graphs, libraries' own memory."""
    before = free_bytes()
    runs = model.runs_of(made, job, peers, shared=True)
    graphs = []
    for run in runs:
        try:
            graphs.append(gpu.capture(run))
        except Exception as error:
            print(f"{run.provider}: {gpu.reason_of(error)}")
    used = before - free_bytes()  # the graphs and their memory are alive
    return max(0, used - job.shape.B * sequence_bytes(job) // job.config.layers)


def largest_batch(made: model.Model, job: model.Job, peers: Mapping[SDPBackend, str]) -> int:
    """Sequences that should fit, by a step of about as many; 0 where none does."""
    each = sequence_bytes(job)
    guess = max(1, (free_bytes() - FIRST_GUESS - MARGIN) // each)
    try:
        reserve = needed(made, with_batch(job, guess), peers)
    except RuntimeError as error:
        if not model.no_room(gpu.reason_of(error)):
            raise
        reserve = FIRST_GUESS
    free = free_bytes()
    batch = max(0, (free - reserve - MARGIN) // each)
    print(
        f"{job.preset or 'bf16'}: {free / 1e9:.2f} GB free beside the weights, a step needs "
        f"{reserve / 1e9:.2f}, a sequence {each / 1e9:.3f}: {batch} sequences", flush=True,
    )  # fmt: skip
    return batch


def smaller(batch: int) -> int:
    """The next batch to try."""
    return min(batch - 1, int(batch * (1 - LESS)))


def is_timed(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["us_median"] != "" for row in rows)


def fitted(
    made: model.Model,
    job: model.Job,
    peers: Mapping[SDPBackend, str],
    rounds: int,
    skipped: dict[str, str],
) -> list[dict[str, Any]]:
    """Rows of the largest batch that runs; none where nothing fits."""
    batch = largest_batch(made, job, peers)
    for _ in range(MOST_TRIES):
        if batch < 1:
            break
        rows = model.measure(made, with_batch(job, batch), peers, rounds, skipped)
        if is_timed(rows):
            return rows
        print(f"{job.preset or 'bf16'}: {batch} sequences do not fit", flush=True)
        batch = smaller(batch)
    return []


def estimates(jobs: Sequence[model.Job]) -> list[model.Job]:
    """One sequence, and about as many as will be run, so that their kernels are compiled first."""
    free = free_bytes() - FIRST_GUESS - MARGIN - weight_bytes(jobs[0].config)
    bf16 = max(1, free // sequence_bytes(jobs[0]._replace(preset="")))
    batches = [(1, bf16, max(1, free // sequence_bytes(job))) for job in jobs]
    return list(
        dict.fromkeys(with_batch(job, n) for job, ns in zip(jobs, batches, strict=True) for n in ns)
    )


def run(
    arguments: argparse.Namespace,
    config: model.Config,
    shapes: Sequence[gpu.Shape],
    peers: Mapping[SDPBackend, str],
) -> int:
    page_size, rounds = arguments.page_size, arguments.rounds
    jobs = [model.Job(config, s, preset, page_size) for s in shapes for preset in arguments.presets]
    largest = max(s.L * s.Hk * s.D for s in shapes)
    by_length = [estimates([j for j in jobs if j.shape == s]) for s in shapes]
    warmed = [job for estimated in by_length for job in estimated]
    gpu.in_workers(model.warm, warmed, arguments.jobs, 4 * largest + 2**28)
    made = model.Model(config)
    environment = gpu.environment(arguments.commit)

    def note(what: str, before: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        """Writes rows as they come; ``before`` are those they are compared with."""
        with_speeds(before, new)
        fields = {**environment, "what": what}
        gpu.append_csv(arguments.csv, [{**fields, **row} for row in new], model.COLUMNS)
        before += new

    for shape in shapes:
        skipped: dict[str, str] = {}
        here = [j for j in jobs if j.shape == shape]
        bf16 = model.Job(config, shape, "", page_size)
        one: list[dict[str, Any]] = []
        for job in (bf16, *here):
            note("step", one, model.measure(made, job, peers, rounds, skipped))
        model.show(shape, one)
        full: list[dict[str, Any]] = []
        note("fit", full, fitted(made, bf16, peers, rounds, skipped))
        most = full[0]["B"] if full else 0
        for job in here if most else ():
            new = model.measure(made, with_batch(job, most), peers, rounds, skipped)
            note("step", full, new)
        if most:
            model.show(shape._replace(B=most), full)
        base = [r for r in full if not r["preset"]]
        for job in here:
            rows = fitted(made, job, peers, rounds, skipped)
            note("fit", list(base), rows)
            if not rows:
                print(f"{job.preset}: nothing fits")
                continue
            model.show(shape._replace(B=rows[0]["B"]), rows)
            print(summary(rows[0], most), flush=True)
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
    return 0


def with_speeds(before: Sequence[Mapping[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Adds tokens a second in units of the fastest bf16 provider's, there or ``before``.

    Of equal batches that is the ratio of the times.
    """
    timed = [r for r in (*before, *rows) if r["us_median"] != ""]
    best = max((r["tokens_per_second"] for r in timed if not r["preset"]), default=None)
    for row in rows:
        known = best is not None and row["us_median"] != ""
        row["ratio_to_bf16"] = row["tokens_per_second"] / best if known else ""


def summary(row: Mapping[str, Any], most: int) -> str:
    """A sentence on what fits; ``most`` is bf16's batch."""
    words = f"{row['preset']}: {row['B']} sequences of {row['L']} tokens"
    if not most:
        return f"{words}; none fits with bf16"
    words += f", {row['B'] / most:.2f} times as many as the {most} of bf16"
    if row["ratio_to_bf16"] == "":
        return words
    return f"{words}, with {row['ratio_to_bf16']:.2f} times its tokens a second"
