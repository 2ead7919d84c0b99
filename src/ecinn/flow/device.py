"""The device that networks run on."""

import torch

from ecinn.errors import InputError


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device of that name; "auto" is a GPU where there is one, else the CPU."""
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"a device is 'cpu', 'cuda' or 'auto', not {device!r}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no usable GPU was found: choose the device 'cpu' or 'auto'")
    return chosen
