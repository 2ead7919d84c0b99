"""Audit a model: what it looks at and where it errs, measured over many images."""

from ecinn.auditing.measurement import audit
from ecinn.auditing.result import Audit

__all__ = ["Audit", "audit"]
