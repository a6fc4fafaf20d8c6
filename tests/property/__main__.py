"""The long run: ``python -m tests.property --examples 20000 [--backend native] [--seed N]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property", description=__doc__)
    parser.add_argument("--examples", type=int, default=20000, help="of all properties together")
    parser.add_argument("--framework", choices=["torch", "jax"], default="torch")
    parser.add_argument("--backend", choices=["native", "interpret", "triton"], default="native")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=["small", "medium", "large"], default="medium")
    parser.add_argument("--shapes", type=int, default=6, help="that JAX compiles a property")
    parser.add_argument("--property", action="append", help="only these")
    args = parser.parse_args(words)
    if args.backend == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
        # Numpy computes both sides of a choice and says so of the side that is not taken.
        warnings.simplefilter("ignore", RuntimeWarning)
        from tests.interpret.speed import patch_the_language_once

        patch_the_language_once()

    from tests.engines import Engine
    from tests.property.checks import PROPERTIES
    from tests.property.running import run

    device = "cuda" if args.backend == "triton" else "cpu"
    engine = Engine(args.framework, args.backend, device)
    names = [n for n, p in PROPERTIES.items() if p.applies(engine) and n in (args.property or [n])]
    shares = sum(PROPERTIES[n].share for n in names)
    tried: Counter[tuple[str, str]] = Counter()
    failed = []
    for name in names:
        start, before = time.time(), tried.total()
        count = max(1, args.examples * PROPERTIES[name].share // shares)
        try:
            run(
                name, engine, count, seed=args.seed, shapes=args.shapes, size=args.size,
                tried=tried,
            )  # fmt: skip
            result = "ok"
        except Exception:
            traceback.print_exc(limit=-3)
            failed.append(name)
            result = "FAILED"
        took = time.time() - start
        print(
            f"{engine} {name}: {result}, {tried.total() - before} examples, {took:.0f} s",
            flush=True,
        )
    by_format: Counter[str] = Counter()
    for (_, config), count in tried.items():
        by_format[config] += count
    print(f"\n{tried.total()} examples, seed {args.seed}, {len(failed)} properties failed")
    for config, count in sorted(by_format.items()):
        print(f"  {config}: {count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
