"""The command line: parse, call, print, turn an error into an exit status."""

from raymm.cli.commands import main

__all__ = ["main"]
