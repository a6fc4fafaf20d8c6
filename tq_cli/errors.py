"""The error of every subcommand."""

from __future__ import annotations


class CommandError(Exception):
    """What the user has to change, in one sentence."""
