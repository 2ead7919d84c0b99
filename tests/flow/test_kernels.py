"""The GPU's kernels: they are right, and other devices and weights do without them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ecinn.flow.fused import gpu_kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_kernels_compute_their_formulas() -> None:
    """Runs in another process, because Triton is interpreted or compiled from its import on."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_functions=check_*"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/helpers/kernel_checks.py"],
        cwd=ROOT,
        env=os.environ | interpreted,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout


def test_weights_elsewhere_or_in_double_precision_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    assert gpu_kernels(torch.device("cpu"), torch.float32) is None
    assert gpu_kernels(gpu, torch.float64) is None
    monkeypatch.setitem(sys.modules, "ecinn.flow.kernels", None)  # as without Triton
    monkeypatch.delattr("ecinn.flow.kernels", raising=False)
    assert gpu_kernels.__wrapped__(gpu, torch.float32) is None
