"""Limits of the service, each with the reason for it."""

import os
from dataclasses import dataclass

MAX_IMAGES = 32
"""Images of one request."""
MAX_FRAMES = 61
"""Frames of one path, besides the tipping point and the convincing counterfactual."""
MAX_ALPHA = 5.0
"""Far beyond α₁ the decoder shows nothing recognisable."""
MAX_ROWS = 256
"""Rows of an image that is given as numbers."""


@dataclass(frozen=True)
class Settings:
    """Limits on requests, and shares of the machine."""

    body_bytes: int = 16 * 2**20
    """Size of one request: a few photographs of a phone."""
    bodies_bytes: int = 256 * 2**20
    """Size of all requests and unread answers together, which bounds the memory they take."""
    body_values: int = 500_000
    """Values in a JSON body, counted by its commas before parsing: 32 faces as numbers fit."""
    body_lists: int = 150_000
    """Lists in a JSON body, which cost more to parse than values: 32 faces have 133,000."""
    head_seconds: float = 10.0
    """Time for a request's headers to arrive."""
    body_seconds: float = 20.0
    """Time for its body to arrive, and for each 48 KiB of the answer to be read."""
    answer_seconds: float = 90.0
    """Time from the complete body to the last byte of the answer; then the work is cancelled."""
    connections: int = 1024
    """Open connections; one more is answered with 503 and closed."""
    in_flight: int = 512
    """Requests in progress, of any kind."""
    queued: int = 256
    """Requests that wait for the network, for predictions and explanations each."""
    file_pixels: int = 24_000_000
    """Largest total number of pixels of a request's image files, checked before decoding."""
    answer_values: int = 1_000_000
    """Values of all images of one answer: 1,275 digits or 81 faces."""
    pass_values: int = 400_000
    """Values of images that are batched into one pass, so that no request waits for long."""
    part_values: int = 100_352
    """Values that go through the network at once on one thread: 128 digits. One core alone is
    fastest with 32, but every part also takes the interpreter's lock from the other threads."""
    part_images: int = 4
    """Smallest number of images in a part, however large they are."""
    join_seconds: float = 0.004
    """Time that an idle network waits for more requests to batch."""
    passes: int = 2
    """Explanation batches in progress, so that a small one need not wait for a large one."""
    threads: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    """Threads that evaluate the network, one per core."""
    hosts: tuple[str, ...] = ()
    """Accepted host names; empty for any. Protects a loopback service from DNS rebinding."""
