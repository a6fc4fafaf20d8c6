"""The fault matrix: kinds of inputs that broke other libraries, and the tests of each.

``python -m tests.faults`` prints it and runs the tests of the CPU; ``--gpu`` those of a GPU. A name
without a file is a check of `tests/hard.py`, which every engine runs that has it; others are
functions, whose folder says where they run. tests/core/test_faults.py looks that all exist and that
a kind without tests in a place says why.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Where kinds are tested, and the folders and files of each.
PLACES = {
    "native torch": ("tests/torch/", "tests/property/test_torch.py", "tests/hf/"),
    "native jax": ("tests/jax/", "tests/property/test_jax.py"),
    "interpret": ("tests/interpret/", "tests/parity/test_interpret.py"),
    "gpu": (
        "tests/gpu/",
        "tests/parity/test_gpu.py",
        "tests/torch/test_gpu.py",
        "tests/hf/test_gpu.py",
    ),
}
#: The file that runs a check of `tests/hard.py` in a place, and the engine it is for.
HARD = {
    "native torch": ("tests/torch/test_hard.py", "torch-native"),
    "native jax": ("tests/jax/test_hard.py", "jax-native"),
    "interpret": ("tests/interpret/test_hard.py", "torch-interpret"),
    "gpu": ("tests/gpu/test_hard.py", "torch-triton"),
}

NO_STRIDES = "JAX has no strides"
NO_TIMES = "times of a CPU say nothing of a GPU's"
NO_STREAMS = "no streams or graphs there"


class Kind(NamedTuple):
    """A kind of fault: where it belongs, what it is, its tests, and why a place has none."""

    area: str
    text: str
    tests: tuple[str, ...]
    gaps: Mapping[str, str] = {}


KINDS = (
    Kind(
        "shapes",
        "head_dims that are no power of two, and large ones",
        ("head_dims", "every_head_dim"),
    ),
    Kind(
        "shapes",
        "a format right at one head_dim and wrong at its neighbours",
        ("formats", "every_head_dim"),
    ),
    Kind("shapes", "query heads a KV head: 3, 5, 6, 7, 12, above 16", ("groups",)),
    Kind(
        "shapes",
        "every key format with every value format; unknown formats are refused",
        (
            "formats",
            "tests/torch/test_hard.py::test_every_format_at_every_head_dim",
            "tests/torch/test_noticed.py::test_any_pair_of_formats_that_writes_nothing_is_noticed",
            "tests/jax/test_hard.py::test_every_format_at_every_head_dim",
            "tests/interpret/test_kernels.py::test_store",
            "tests/gpu/test_hard.py::test_every_format_at_every_head_dim",
            "tests/core/test_cases.py::test_store_covers_every_pair_at_every_head_dim",
            "tests/core/test_config.py::test_wrong_values_are_refused",
        ),
    ),
    Kind("shapes", "page sizes from 1 up give the same", ("page_sizes",)),
    Kind(
        "shapes",
        "lengths around a page, a tile, a split; lengths 1000 times apart in a batch",
        (
            "lengths",
            "tests/interpret/test_kernels.py::test_lengths_that_differ_without_a_plan",
            "tests/interpret/test_shares.py::test_uneven_sequences",
            "tests/gpu/test_triton.py::test_many_sequences_of_uneven_lengths",
        ),
    ),
    Kind(
        "addressing",
        "block tables no wider than needed, and -1 in what nobody reads",
        ("narrow_tables",),
    ),
    Kind(
        "addressing",
        "pages and rows past 2^31 bytes or elements",
        (
            "far_pages",
            "far_rows",
            "tests/jax/test_store.py::test_pages_beyond_two_gib",
            "tests/gpu/test_triton.py::test_pages_past_2_gigabytes",
        ),
    ),
    Kind(
        "addressing",
        "slices of fused arrays, transposes, expanded arrays, a cache inside of a larger one",
        (
            "fused_arrays",
            "tests/torch/test_store.py::test_expanded_inputs",
            "tests/gpu/test_triton.py::test_strided_arrays",
        ),
        {"native jax": NO_STRIDES},
    ),
    Kind(
        "addressing",
        "nothing is read or written past the end of an allocation",
        (
            "tests/torch/test_guarded.py::test_nothing_past_the_end",
            "tests/interpret/test_guarded.py::test_nothing_past_the_end",
            "tests/gpu/test_triton.py::test_a_cache_at_the_end_of_an_allocation",
        ),
        {"native jax": "gathers of XLA stay inside their arrays"},
    ),
    Kind(
        "addressing",
        "an array of the size of a 16-bit cache, or of any other wrong one, is named",
        (
            "tests/torch/test_refusals.py::test_attention",
            "tests/torch/test_refusals.py::test_store",
            "tests/jax/test_refusals.py::test_refusal",
        ),
        {
            "interpret": "refused before a backend is chosen",
            "gpu": "refused before a backend is chosen",
        },
    ),
    Kind(
        "addressing",
        "permuted, shared and reused pages, stale bytes in their unused tails",
        (
            "tests/property/test_torch.py::test_server",
            "tests/property/test_jax.py::test_server",
            "tests/interpret/test_property.py::test_server",
            "tests/gpu/test_property.py::test_server",
            "tests/gpu/test_triton.py::test_stale_memory_never_matters",
        ),
    ),
    Kind(
        "values",
        "keys with a common offset, constant, one-hot, with one huge channel",
        ("keys", "hard_keys_come_back"),
    ),
    Kind(
        "values",
        "values with an offset of 1000, constant, of 1e-6, with outliers of 70000",
        ("values",),
    ),
    Kind(
        "values",
        "zero keys, norms of 300 to 800 and past 65504; NaN and infinity reach no other token",
        ("keys", "bad_tokens"),
    ),
    Kind("values", "fp8 keys up to 448 and above, also where there is no fp8 type", ("fp8_range",)),
    Kind("values", "one key equal to the query, anywhere in a page and a split", ("needle",)),
    Kind(
        "batches",
        "decode, chunk and empty rows in one call; more rows than tokens",
        ("speculative_rows",),
    ),
    Kind("batches", "the last rows of a long prompt beside a whole short one", ("prefix_hit",)),
    Kind(
        "batches",
        "sequences that come, go and change places; pages added later; forks, evictions, copies",
        (
            "tests/property/test_torch.py::test_server",
            "tests/property/test_jax.py::test_server",
            "tests/interpret/test_property.py::test_server",
            "tests/gpu/test_property.py::test_server",
        ),
    ),
    Kind(
        "batches",
        "the bits of a sequence depend on what else is in the batch, where that was ruled out",
        (
            "tests/interpret/test_kernels.py::test_a_sequence_has_the_same_bits_in_any_batch",
            "tests/gpu/test_triton.py::test_a_sequence_has_the_same_bits_in_any_batch",
            "tests/gpu/test_triton.py::test_a_long_sequence_has_the_same_bits_in_any_batch",
        ),
        {
            "native torch": "a promise of the kernels' plans alone",
            "native jax": "a promise of the kernels' plans alone",
        },
    ),
    Kind(
        "running",
        "a graph captured at length 1 and replayed at 40k; graphs of two batch sizes",
        (
            "tests/gpu/test_triton.py::test_a_graph_captured_at_length_1_serves_40000",
            "tests/gpu/test_triton.py::test_graphs_of_two_batch_sizes",
            "tests/gpu/test_triton.py::test_a_graph_serves_uneven_lengths",
        ),
        {"native torch": NO_STREAMS, "native jax": NO_STREAMS, "interpret": NO_STREAMS},
    ),
    Kind(
        "running",
        "no scratch that grows with the prefix",
        (
            "tests/torch/test_attention.py::test_memory_does_not_grow_with_the_sequence",
            "tests/jax/test_attention.py::test_scratch_does_not_grow_with_the_sequence",
            "tests/core/test_workspace.py::test_scratch_does_not_grow_with_the_prefix",
        ),
        {
            "interpret": "plans are those of GPUs: tests/core/test_workspace.py",
            "gpu": "scratch is in the plan: tests/core/test_workspace.py",
        },
    ),
    Kind(
        "running",
        "slower than 16-bit attention, or a replayed graph slower than the call",
        (),
        {
            "native torch": NO_TIMES,
            "native jax": NO_TIMES,
            "interpret": NO_TIMES,
            "gpu": "measured, with a check: python -m bench decode --grid --check, bench launch",
        },
    ),
    Kind(
        "running",
        "nothing waits for the device",
        ("tests/gpu/test_triton.py::test_the_device_is_never_waited_for",),
        {"native torch": NO_STREAMS, "native jax": NO_STREAMS, "interpret": NO_STREAMS},
    ),
    Kind(
        "running",
        "several threads and streams, and the first calls of all at once",
        (
            "threads",
            "tests/gpu/test_triton.py::test_first_calls_from_many_threads",
            "tests/gpu/test_triton.py::test_two_threads_on_two_streams",
            "tests/gpu/test_triton.py::test_two_graphs_at_once",
            "tests/gpu/test_triton.py::test_a_device_that_is_not_the_current_one",
            "tests/torch/test_launch.py::test_buffers_are_made_once_by_many_threads",
        ),
        {"interpret": "Triton's interpreter has one state for the process"},
    ),
    Kind(
        "running",
        "memory runs out: the error is the framework's own, the cache as it was",
        (
            "tests/torch/test_serving.py::test_no_memory_for_scratch_leaves_the_cache_and_the_next_call_whole",
        ),
        {
            "native jax": "XLA allocates before it runs",
            "interpret": "as native torch: before any launch",
            "gpu": "as native torch: before any launch",
        },
    ),
    Kind(
        "running",
        "a device whose shared memory is too small",
        (
            "tests/torch/test_serving.py::test_a_small_gpu_gets_smaller_tiles_or_a_reason",
            "tests/torch/test_serving.py::test_a_small_gpu_dequantizes_with_smaller_tiles",
        ),
        {
            "native jax": "plans are the same: tests/parity/test_plans.py",
            "interpret": "nothing is compiled",
            "gpu": "tested with faked devices",
        },
    ),
    Kind(
        "snapshots",
        "truncated, changed, foreign or half-written files",
        (
            "tests/torch/test_snapshot.py::test_refusals",
            "tests/jax/test_snapshot.py::test_refusals",
            "tests/core/test_snapshot.py::test_every_truncation_is_refused",
            "tests/core/test_snapshot.py::test_every_flipped_bit_is_refused",
            "tests/core/test_snapshot.py::test_a_process_killed_while_it_writes_leaves_the_old_file",
        ),
        {"interpret": "no kernel takes part", "gpu": "no kernel takes part"},
    ),
    Kind(
        "any",
        "random formats, shapes, strides, tables, lengths, features and values",
        (
            "tests/property/test_torch.py::test_property",
            "tests/property/test_jax.py::test_property",
            "tests/interpret/test_property.py::test_property",
            "tests/gpu/test_property.py::test_property",
        ),
    ),
)


def tests_of(kind: Kind, place: str) -> list[str]:
    """Tests of a kind in a place, as pytest takes them."""
    from tests.hard import CHECKS, NOT_FOR

    file, engine = HARD[place]
    found = []
    for test in kind.tests:
        if "::" not in test:
            if test not in CHECKS:
                raise LookupError(f"tests/hard.py has no check {test}")
            if test not in NOT_FOR.get(engine, ()):
                found.append(f"{file}::test_hard[{test}]")
        elif test.startswith(PLACES[place]) and place == _place(test):
            found.append(test)
    return found


def _place(test: str) -> str:
    """Where a test runs: that with the longest matching name."""
    names = [
        (len(p), place) for place, paths in PLACES.items() for p in paths if test.startswith(p)
    ]
    return max(names)[1] if names else ""


@cache
def functions(file: str) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def table() -> str:
    """A row a kind: its number of tests in each place, ``-`` where there is none."""
    lines = [f"{'':12}{'':88}" + "".join(f"{place:>14}" for place in PLACES)]
    for kind in KINDS:
        counts = "".join(f"{len(tests_of(kind, place)) or '-':>14}" for place in PLACES)
        lines.append(f"{kind.area:12}{kind.text:88}{counts}")
    return "\n".join(lines)


def run(tests: Iterable[str], environment: Mapping[str, str], mark: str) -> int:
    """Runs tests in a process of their own; pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", mark, *dict.fromkeys(tests)]
    print(f"\n{' '.join(environment)} {len(command) - 6} tests", flush=True)
    return subprocess.call(command, cwd=ROOT, env={**os.environ, **environment})


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="run the tests of a GPU, not of the CPU")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args(words)
    print(table())
    for kind in KINDS:
        for place, reason in kind.gaps.items():
            print(f"{kind.text}: not {place}: {reason}")
    if args.list:
        return 0
    if args.gpu:
        return run([t for k in KINDS for t in tests_of(k, "gpu")], {}, "gpu")
    core = [t for k in KINDS for t in k.tests if t.startswith("tests/core/")]
    native = [t for k in KINDS for p in ("native torch", "native jax") for t in tests_of(k, p)]
    interpret = [t for k in KINDS for t in tests_of(k, "interpret")]
    failed = run([*core, *native], {}, "not gpu")
    return run(interpret, {"TRITON_INTERPRET": "1"}, "not gpu") or failed


if __name__ == "__main__":
    sys.exit(main())
