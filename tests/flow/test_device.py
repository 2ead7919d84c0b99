"""Choosing a device."""

import pytest
import torch

from ecinn.errors import InputError
from ecinn.flow.device import resolve_device


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (2, "cuda")])
def test_auto_is_a_gpu_if_there_is_one(
    gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_device("auto") == resolve_device() == torch.device(expected)
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        if gpus:
            assert resolve_device(name) == torch.device(name)
        else:
            with pytest.raises(InputError, match="no usable GPU"):
                resolve_device(name)
    with pytest.raises(InputError, match="cuda:2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="must be 'cpu', 'cuda' or 'auto'"):
        resolve_device(name)
