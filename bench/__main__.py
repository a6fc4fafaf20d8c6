"""Command line of the benchmarks, one subcommand a module."""

from __future__ import annotations

import argparse
import sys

from bench import (
    calibrated,
    chunk,
    cpu,
    decode,
    frameworks,
    launch,
    mixed,
    model,
    ragged,
    report,
    store,
    tune,
)

MODULES = (
    cpu, decode, calibrated, ragged, chunk, store, mixed, launch, frameworks, model, tune, report,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
