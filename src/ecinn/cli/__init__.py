"""The command line: every command in a file of its own."""

# They register as they are imported, and help lists them in this order.
from ecinn.cli import explain, models, evaluate  # noqa: F401, I001
from ecinn.cli import benchmark, benchmark_faces, benchmark_heatmaps  # noqa: F401
from ecinn.cli import benchmark_rounding, audit  # noqa: F401
from ecinn.cli import train, teacher, judges, inception, beta  # noqa: F401
from ecinn.cli import serve  # noqa: F401
from ecinn.cli import paper  # noqa: F401
from ecinn.cli.app import main

__all__ = ["main"]
