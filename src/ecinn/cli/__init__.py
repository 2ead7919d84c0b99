"""The command line: one module per command, each with light imports at module level."""

from ecinn.cli import (  # noqa: F401
    audit,
    benchmark,
    benchmark_models,
    beta,
    evaluate,
    explain,
    inception,
    judges,
    models,
    paper,
    serve,
    teacher,
    train,
)
from ecinn.cli.app import main

__all__ = ["main"]
