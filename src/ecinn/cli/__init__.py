"""The command line: the commands by module, each with light imports at module level."""

from ecinn.cli import (  # noqa: F401
    audit,
    benchmark,
    benchmark_models,
    beta,
    bulk,
    distill,
    evaluate,
    explain,
    export,
    models,
    networks,
    paper,
    serve,
    site,
    train,
)
from ecinn.cli.app import main

__all__ = ["main"]
