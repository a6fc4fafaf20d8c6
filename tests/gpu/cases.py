"""Cases that only a GPU is fast enough for, beside those of the shared table."""

from __future__ import annotations

from dataclasses import replace

from tests.cases import ATTENTION_CASES, PRESET_CONFIGS, STORE_CASES, AttentionCase, StoreCase

HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256, 512, 576)
GROUPS = (3, 5, 6, 7, 12, 24, 71)
PAGE_SIZES = (1, 16, 64, 256)
PRESETS = ("4bit", "k8v4", "3bit", "k3v4", "2bit", "3bit_hq", "k8v8", "4bit_hq", "2bit_hq")
DTYPES = ("float16", "bfloat16", "float32")
DECODE = ((1, 700), (1, 1), (1, 64), (1, 0), (1, 65), (1, 63), (1, 257))
SPECULATIVE = ((4, 300), (2, 1), (8, 65), (3, 64), (0, 5), (5, 129))


def _cases() -> tuple[AttentionCase, ...]:
    cases = [c for c in ATTENTION_CASES if c.head_dim % 8 == 0]
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, batch in enumerate((DECODE, SPECULATIVE)):
            n = 2 * i + j
            cases.append(
                AttentionCase(
                    PRESET_CONFIGS[PRESETS[n % len(PRESETS)]],
                    head_dim,
                    PAGE_SIZES[n % len(PAGE_SIZES)],
                    ("planes", "token", "head")[n % 3],
                    num_kv_heads=1 + n % 2,
                    group=GROUPS[n % len(GROUPS)],
                    dtype=DTYPES[n % 3],
                    batch=batch,
                )
            )
    for n, preset in enumerate(PRESETS):
        cases.append(
            AttentionCase(
                PRESET_CONFIGS[preset],
                128,
                PAGE_SIZES[n % len(PAGE_SIZES)],
                group=GROUPS[n % len(GROUPS)],
                dtype=DTYPES[n % 3],
                batch=DECODE,
            )
        )
    return tuple(cases)


ATTENTION = _cases()

#: Sequences of very different lengths, up to 130 thousand tokens.
LONG = (
    AttentionCase(
        head_dim=128, page_size=64, num_kv_heads=1, dtype="bfloat16", seed=1,
        batch=((1, 130_000), (1, 1), (1, 65_537), (1, 16)),
    ),
    AttentionCase(
        PRESET_CONFIGS["k3v4"], num_kv_heads=1, group=3, dtype="float16", seed=1,
        batch=((2, 70_001), (17, 90_000), (1, 100)),
    ),
    AttentionCase(
        PRESET_CONFIGS["k8v4"], num_kv_heads=1, group=2, sliding_window=5000, seed=1, page_size=256,
        batch=((1, 130_000), (3, 4999), (1, 5001)),
    ),
)  # fmt: skip


def _store_cases() -> tuple[StoreCase, ...]:
    eligible = [c for c in STORE_CASES if c.head_dim % 8 == 0]
    cases = {c.config: c for c in eligible[::-1]}
    cases |= {str(c): c for c in eligible if str(c.extras)}
    cases |= {str(c): c for c in eligible[::4]}
    cases |= {
        str(c): c
        for i, head_dim in enumerate((512, 576))
        for c in [
            replace(eligible[0], config=PRESET_CONFIGS[p], head_dim=head_dim, page_size=16)
            for p in PRESETS[i::2]
        ]
    }
    return tuple(dict.fromkeys(cases.values()))


STORE = _store_cases()
