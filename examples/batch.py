"""Prompts of different lengths as one packed batch over a pool of pages, for either framework.

Sizes: ``N`` prompt tokens in all, ``B`` sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Prompts one after the other, and the pages of their sequences.

    ``ids`` int32 [N]; ``query_start_loc`` int32 [B + 1]: prompt ``b`` is ``ids`` from entry ``b``
    to entry ``b + 1``; ``block_table`` int32 [B, max_pages]: the pages of each sequence, its new
    tokens included, -1 past the last.
    """

    ids: np.ndarray
    query_start_loc: np.ndarray
    block_table: np.ndarray

    @property
    def prompt_lens(self) -> np.ndarray:
        """Tokens of each prompt, int32 [B]."""
        return np.diff(self.query_start_loc)


def pack(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, page_size: int, num_pages: int
) -> Batch:
    """Packs prompts and gives each sequence pages for its prompt and ``max_new_tokens`` more.

    Args:
        prompts: token ids, at least one a prompt.
        max_new_tokens: most tokens that a sequence may grow by, at least 1.
        page_size: tokens of a page.
        num_pages: pages there are.

    Raises:
        ValueError: no prompt, an empty one, fewer than 1 new token, or too few pages.
    """
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    if not lens.size or not lens.all():
        raise ValueError(f"prompts: expected at least one token in each, got lengths {[*lens]}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    pages = pages_of(lens + max_new_tokens, page_size)
    ends = np.cumsum(pages)
    if ends[-1] > num_pages:
        raise ValueError(
            f"prompts: expected at most the {num_pages} pages of {page_size} tokens that the cache "
            f"has, got {lens.size} prompts that with {max_new_tokens} new tokens take {ends[-1]}"
        )
    column = np.arange(pages.max())
    table = np.where(column < pages[:, None], (ends - pages)[:, None] + column, -1)
    starts = np.concatenate(([0], np.cumsum(lens)))
    ids = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
    return Batch(ids, starts.astype(np.int32), table.astype(np.int32))


def pages_of(lengths: int | Sequence[int] | np.ndarray, page_size: int) -> np.ndarray:
    """Pages that sequences of these ``lengths`` [B] take, each its own; int [B]."""
    return -(-np.atleast_1d(lengths) // page_size)


def check_temperature(temperature: float) -> None:
    """Raises ValueError unless ``temperature`` is 0 (the likeliest token) or at least 1e-6."""
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= 1e-6)):
        raise ValueError(f"temperature: expected 0 or a number from 1e-6 on, got {temperature}")
