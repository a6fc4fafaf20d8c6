"""Arguments of ``tq`` and what becomes of errors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import tq_core
from tq_cli import calibrate, evaluate, info, plan
from tq_cli.errors import CommandError


class Command(Protocol):
    """What a module of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the subcommand's arguments."""

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        """Does the work; what it returns is what ``--json`` prints."""

    def text(self, result: dict[str, Any]) -> str:
        """The result for people."""


class _Entry(NamedTuple):
    command: Command
    summary: str
    description: str


COMMANDS = {
    "info": _Entry(info, "say what this machine can run", info.DESCRIPTION),
    "plan": _Entry(plan, "say how many tokens of a model fit into memory", plan.DESCRIPTION),
    "calibrate": _Entry(
        calibrate, "measure a model and write a codec for each layer", calibrate.DESCRIPTION
    ),
    "eval": _Entry(
        evaluate, "measure what packing the cache costs in accuracy", evaluate.DESCRIPTION
    ),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says more\n")


def parser() -> argparse.ArgumentParser:
    """The parser of ``tq`` and of its subcommands."""
    top = _Parser(
        prog="tq",
        description="Tools around a KV cache packed to 2 to 8 bits a coordinate.",
        epilog="`tq COMMAND --help` says more about a command.",
    )
    top.add_argument("--version", action="version", version=f"tq {tq_core.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=entry.summary,
            description=entry.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        entry.command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the same as JSON")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``tq``.

    Args:
        arguments: the words after ``tq``. Default: those of the process.

    Returns:
        The exit status: 0, or 2 after an error, which is one sentence on stderr.
    """
    args = parser().parse_args(arguments)
    command = COMMANDS[args.command].command
    try:
        result = command.run(args)
    except CommandError as error:
        print(f"tq {args.command}: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(result, indent=2) if args.json else command.text(result), flush=True)
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
