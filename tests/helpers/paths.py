"""Where the repository is, and the data that may lie beside it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"
"""Absent on most machines: tests that need it are skipped."""
