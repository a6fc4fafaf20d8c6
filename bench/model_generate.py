"""Generation by the model of ``bench model``: steps that feed their tokens back, as CUDA graphs.

Everything that changes from step to step is on the device: the tokens, the lengths, the number of
steps done. So a single graph of a step over the packed cache serves all of them. The 16-bit peers
take the length from the host and read no padding: each of their steps has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench import gpu, model

#: Why a provider is not timed whose graphs do not do what its calls do.
OTHER_TOKENS = "its graphs give other tokens than its eager calls"

Step = Callable[[], None]


class Replayed(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class State(NamedTuple):
    """What a generation changes, on the device.

    ``ids`` int64 [B]: the tokens to feed. ``lens`` int32 [B]: of the sequences, these included.
    ``done`` int64 [1]: steps. ``written`` int64 [B, N]: the tokens that came out.
    """

    ids: Tensor
    lens: Tensor
    done: Tensor
    written: Tensor

    @classmethod
    def make(cls, first: Tensor, steps: int) -> State:
        """Before the first step, of which nothing is known but its tokens."""
        lens = torch.zeros(len(first), dtype=torch.int32, device=first.device)
        done = torch.zeros(1, dtype=torch.int64, device=first.device)
        return cls(first.clone(), lens, done, first.new_zeros((len(first), steps)))

    def reset(self, first: Tensor, length: int) -> None:
        """Back to where ``first`` [B] are the last of ``length`` tokens."""
        self.ids.copy_(first)
        self.lens.fill_(length)
        self.done.zero_()
        self.written.fill_(-1)

    def advance(self, logits: Tensor) -> None:
        """Takes the likeliest tokens; logits ``[B, vocab]``."""
        self.ids.copy_(logits.argmax(-1))
        self.written.index_copy_(1, self.done, self.ids[:, None])
        self.done.add_(1)
        self.lens.add_(1)


def steps_of(
    made: model.Model, job: model.Job, peers: Mapping[SDPBackend, str], state: State
) -> dict[str, list[Step]]:
    """The steps of each provider over new caches, which end at the job's length."""
    shape, steps = job.shape, state.written.shape[1]
    if job.preset:
        data, caches = model.packed_caches(job)

        def step() -> None:
            attend = model.packed_at(state.lens, data, caches)
            state.advance(made(state.ids, state.lens, attend))

        return {model.OURS: [step] * steps}
    dense = model.dense_caches(job)

    def step_at(length: int, backend: SDPBackend) -> Step:
        attend = model.dense(length, dense, backend)
        return lambda: state.advance(made(state.ids, length, attend))

    lengths = range(shape.L - steps + 1, shape.L + 1)
    return {name: [step_at(n, backend) for n in lengths] for backend, name in peers.items()}


def capture(steps: Sequence[Step]) -> list[Replayed]:
    """A graph of each step, one where they are the same; each has run before."""
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[Step, Replayed] = {}
    for step in steps:
        if step not in graphs:
            graph = torch.cuda.CUDAGraph()
            # Replayed one after the other, they can share the memory of what they compute.
            with torch.cuda.graph(graph, pool=pool):
                step()
            graphs[step] = graph
    return [graphs[step] for step in steps]


def elapsed(graphs: Sequence[Replayed]) -> float:
    """Microseconds of a step in a row of replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for graph in graphs:
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / len(graphs)


def timed(
    made: model.Model,
    job: model.Job,
    peers: Mapping[SDPBackend, str],
    rounds: int,
    skipped: dict[str, str],
    *,
    steps: int,
) -> model.Timed:
    """Times of a step in whole generations of ``steps`` tokens a sequence.

    Providers whose graphs give other tokens than eager calls of the same steps are not timed.
    """
    first = model.make_ids(made, job.shape.B)
    state = State.make(first, steps)
    length = job.shape.L - steps + 1
    providers = steps_of(made, job, peers, state)
    model.made_caches()
    result: model.Timed = []
    for name, calls in providers.items():
        label = f"{name} {job.preset or 'bfloat16'}"
        try:
            state.reset(first, length)
            for call in calls:
                call()
            want = state.written.clone()
            state.reset(first, length)
            torch.cuda.synchronize()
            graphs = capture(calls)
            samples = []
            for _ in range(rounds + 1):
                state.reset(first, length)
                samples.append(elapsed(graphs))
            if not torch.equal(state.written, want):
                skipped[label] = OTHER_TOKENS
                continue
        except RuntimeError as error:
            skipped[label] = gpu.reason_of(error)
            continue
        print(
            f"{label}, B={job.shape.B}: {steps} tokens a sequence are those of eager calls, "
            f"{len(want.unique())} different ones in all", flush=True,
        )  # fmt: skip
        result.append((name, gpu.timing_of(samples[1:])))
    return result
