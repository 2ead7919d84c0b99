"""The command line: every command in a file of its own."""

from ecinn.cli import benchmark, evaluate, explain, models, train  # noqa: F401  (they register)
from ecinn.cli.app import main

__all__ = ["main"]
