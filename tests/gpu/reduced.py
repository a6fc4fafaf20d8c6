"""A table small enough for compute-sanitizer: ``python -m tests.gpu.reduced [preset ...]``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from tests.cases import PRESET_CONFIGS, AttentionCase, Extras, StoreCase
from tests.torch.helpers import check_attention, check_dequantize, check_store

BATCH = ((1, 130), (3, 33), (0, 4), (1, 0))
ALL = Extras("heads", "heads", "heads", "heads")


def main(presets: list[str]) -> None:
    start = time.time()
    orders = ("planes", "token", "head")
    for i, (preset, config) in enumerate(PRESET_CONFIGS.items()):
        if presets and preset not in presets:
            continue
        case = AttentionCase(
            config,
            (64, 72, 128)[i % 3],
            (16, 64, 1, 3)[i % 4],
            orders[i % 3],
            group=(4, 3)[i % 2],
            dtype=("float16", "bfloat16")[i % 2],
            batch=BATCH,
        )
        features = replace(
            case, sliding_window=40, softcap=20.0, sinks=True, alibi=True, padding_rows=2
        )
        check_attention(case, "triton", "cuda")
        check_attention(
            replace(case, extras=ALL, dtype="bfloat16"), "triton", "cuda", num_kv_splits=3
        )
        check_attention(features, "triton", "cuda", num_kv_splits=2)
        check_attention(features, "triton", "cuda", num_kv_splits=40)
        check_attention(features, "triton", "cuda", plan={"block_n": 64})
        check_dequantize(case, "triton", "cuda")
        store = StoreCase(config, case.head_dim, case.page_size, case.order, dtype=case.dtype)
        check_store(store, "triton", "cuda")
        check_store(replace(store, extras=ALL), "triton", "cuda")
        print(f"{preset}: ok, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
