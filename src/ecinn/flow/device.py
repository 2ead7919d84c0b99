"""Choose the device that a network runs on."""

import torch

from ecinn.errors import InputError


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device of this name; "auto" is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise InputError(f"the device must be 'cpu', 'cuda' or 'auto', not {str(device)!r}")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(f"no usable GPU {str(resolved)!r} was found: use the device cpu or auto")
    return resolved
