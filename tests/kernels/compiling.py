"""Compiles launches for a GPU that need not be there, and reads what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tq_core import kernels
from tq_core.dispatch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__path__[0]) / "backends/nvidia/bin"

_FP32 = [
    "row_scale_ptr", "row_const_ptr", "value_shift_ptr", "sinks_ptr", "slopes_ptr", "lse_ptr",
    "matrix_ptr", "factor_ptr", "offset_ptr", "part_ptr", "state_ptr", "coded_ptr",
    "key_matrix_ptr", "value_matrix_ptr", "key_offset_ptr", "value_offset_ptr", "key_scale_ptr",
    "key_edges_ptr", "key_levels_ptr", "value_edges_ptr", "value_levels_ptr", "key_factor_ptr",
]  # fmt: skip
_TYPES = {
    **dict.fromkeys(_FP32, "*fp32"),
    **dict.fromkeys(
        ("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "phase_ptr"), "*i32"
    ),
    **dict.fromkeys(("key_table_ptr", "value_table_ptr"), "*fp16"),
    **dict.fromkeys(("key_ptr", "value_ptr", "key_out_ptr", "value_out_ptr"), "*bf16"),
    "cache_ptr": "*u8",
    "slot_ptr": "*i64",
    **dict.fromkeys(("num_tokens", "num_seqs", "num_blocks", "table_stride", "capacity"), "i32"),
}


def compile_launch(launch: Launch, target: str, dtype: str = "bf16"):
    """The compiled kernel of ``launch`` for a target of ``TARGETS``; queries have ``dtype``."""
    function = getattr(kernels.load(), launch.kernel)
    constexprs = dict(launch.constexprs)
    types = dict(_TYPES, query_ptr=f"*{dtype}", out_ptr=f"*{dtype}")
    if launch.kernel == "attention":
        types["query_ptr"] = "*fp16"
        if constexprs["PARTIAL"]:
            types["out_ptr"] = "*fp32"
    if launch.kernel == "transform_query":
        types["out_ptr"] = "*fp16"
    signature = {n: types.get(n, "constexpr") for n in function.arg_names}
    assert {n for n, t in signature.items() if t == "constexpr"} == set(constexprs)
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"
    }
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    source = ASTSource(function, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=TARGETS[target], options=options)


@dataclass(frozen=True)
class Report:
    """What ptxas made of a kernel: its longest unmasked loop and its resources."""

    loop: int
    operations: Counter[str]
    registers: int
    stack_bytes: int
    shared_bytes: int


def report(compiled) -> Report:
    """Disassembles a kernel compiled for ``sm_*``; the loop is the first of the long ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text, usage = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True)
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.stdout.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label.group(1)] = len(instructions)
        if re.search(r"/\*[0-9a-f]{4,5}\*/", line):
            instructions.append(line)
    loops = []
    for end, line in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        start = labels.get(jump.group(1), end) if jump else end
        if end - start > 100:
            loops.append(instructions[start : end + 1])
    loop = loops[0] if loops else []
    names = (re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", line) for line in loop)
    words = usage.stdout + usage.stderr

    def number(key: str) -> int:
        found = re.search(key + r":(\d+)", words)
        assert found, words
        return int(found.group(1))

    return Report(
        loop=len(loop),
        operations=Counter(name.group(1) for name in names if name),
        registers=number("REG"),
        stack_bytes=number("STACK"),
        shared_bytes=compiled.metadata.shared,
    )
