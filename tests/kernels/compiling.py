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

from tq_core import Codec, QuantConfig, dispatch, kernels
from tq_core.dispatch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__path__[0]) / "backends/nvidia/bin"

_TYPES = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "uint8": "*u8", "int32": "*i32",
    "int64": "*i64", "int8": "*i8", "int16": "*i16",
}  # fmt: skip
_CODEC = dispatch.codec_arrays(Codec(QuantConfig.preset("4bit"), 128))
#: Dtypes of the arrays that a launch may read, but for those of the tokens.
_DTYPES = {
    **{name: array.dtype.name for name, array in _CODEC.items()},
    **dict.fromkeys(("row_terms", "sinks", "alibi_slopes", "partial", "state", "coded"), "float32"),
    **dict.fromkeys(("short_partial", "short_state", "lse", "sums", "exponents"), "float32"),
    **dict.fromkeys(("unpacked_keys", "unpacked_values"), "float16"),
    **dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "int32"),
    "cache": "uint8",
    "slot_mapping": "int64",
}


def input_dtypes(launch: Launch, dtype: str) -> list[str]:
    """Dtypes of the arrays that a launch reads; tokens have ``dtype``."""
    rotated = "int8" if "key_grid" in launch.inputs else "float16"
    return [{**_DTYPES, "rotated": rotated}.get(name, dtype) for name in launch.inputs]


def compile_launch(launch: Launch, target: str, dtype: str = "bfloat16"):
    """The compiled kernel of ``launch`` for a target of ``TARGETS``; tokens have ``dtype``."""
    function = getattr(kernels.load(), launch.kernel)
    constexprs = dict(launch.constexprs)
    types = [
        *(_TYPES[name] for name in input_dtypes(launch, dtype)),
        *("i32" for _ in launch.integers),
        *(_TYPES[output.dtype] for output in launch.outputs),
        *("constexpr" for _ in constexprs),
    ]
    signature = dict(zip(function.arg_names, types, strict=True))
    assert {n for n, t in signature.items() if t == "constexpr"} == set(constexprs)
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t[0] == "*"}
    options = {
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        "enable_fp_fusion": launch.fp_fusion,
    }  # fmt: skip
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

    def programs(self, num_warps: int) -> int:
        """Programs that are resident at once on a multiprocessor of sm_90."""
        warp = 32 * -(-self.registers // 8) * 8
        by_registers = 65536 // (num_warps * warp)
        # A program takes 1 KiB besides its own shared memory.
        by_shared = 233472 // (-(-self.shared_bytes // 128) * 128 + 1024)
        return min(by_registers, by_shared, 64 // num_warps, 32)


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
