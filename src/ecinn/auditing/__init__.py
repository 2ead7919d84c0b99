"""Audit a model: what it looks at, where it errs, and whether it is good enough to explain."""

from ecinn.auditing.measurement import audit
from ecinn.auditing.result import Audit
from ecinn.auditing.verdict import Verdict, assess

__all__ = ["Audit", "Verdict", "assess", "audit"]
