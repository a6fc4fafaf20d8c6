"""Continues a batch of prompts over a packed cache: ``python -m examples.generate PROMPT ...``.

In JAX the whole batch is one jitted program, from the prompts to the last token; in PyTorch a loop.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

from examples.batch import check_temperature
from examples.tokenizer import encode, load_or_exit
from tq_core import QuantConfig

UNCOMPRESSED = "none"


def main(argv: list[str] | None = None) -> int:
    """Writes the texts; returns the exit code."""
    arguments = parse(argv)
    weights, tokenizer, path = load_or_exit(arguments.model)
    prompts = [encode(tokenizer, text, weights.config.bos_id) for text in arguments.prompts]
    if not all(prompts):
        print("PROMPT: expected at least 1 token in each", file=sys.stderr)
        return 2
    plain = arguments.preset == UNCOMPRESSED
    quant = None if plain else QuantConfig.preset(arguments.preset)
    llama = import_module(f"examples.llama_{arguments.framework}").Llama(weights)
    cache = llama.new_cache(quant, [len(prompt) + arguments.new_tokens for prompt in prompts])

    start = time.perf_counter()
    written = llama.generate(
        prompts,
        cache,
        arguments.new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    seconds = time.perf_counter() - start
    for prompt, tokens in zip(arguments.prompts, written, strict=True):
        print(f"{prompt}{tokenizer.decode(tokens)}\n")
    print(
        f"{path.name}, {arguments.framework}, cache {arguments.preset} of {cache.bytes_per_token} "
        f"bytes a token: {len(prompts)} sequences, {sum(map(len, written))} new tokens in "
        f"{seconds:.1f} s, compiling included",
        file=sys.stderr,
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="what a text continues")
    parser.add_argument("--model", metavar="PATH", help="a local transformers directory or GGUF")
    parser.add_argument("--framework", choices=("torch", "jax"), default="jax")
    parser.add_argument(
        "--preset", default="4bit", help=f"of the cache; {UNCOMPRESSED}: 16 bit (%(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="most tokens of a text (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of the draws; 0: the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.preset != UNCOMPRESSED:
        try:
            QuantConfig.preset(arguments.preset)
        except ValueError as error:
            parser.error(f"--preset: {error}")
    try:
        check_temperature(arguments.temperature)
    except ValueError as error:
        parser.error(f"--{error}")
    if any("\udc80" <= letter <= "\udcff" for text in arguments.prompts for letter in text):
        parser.error("PROMPT: expected text in UTF-8")
    if arguments.new_tokens < 1:
        parser.error("--new-tokens: expected at least 1")
    if not 0 <= arguments.seed < 2**32:
        parser.error("--seed: expected a number from 0 to 2^32 - 1")
    if arguments.model is not None and not Path(arguments.model).exists():
        parser.error(f"--model: {arguments.model} does not exist")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
