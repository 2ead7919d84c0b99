"""Every limit of the service; each value says what it keeps bounded."""

import os
from dataclasses import dataclass

MOST_IMAGES = 32
"""Of one request."""
MOST_FRAMES = 61
"""Of one path, besides the tipping point and the convincing picture."""
FURTHEST_ALPHA = 5.0
"""Far beyond α₁ a decoder shows nothing any more."""
MOST_ROWS = 256
"""Of an image that is given as numbers."""


@dataclass(frozen=True)
class Settings:
    """What the service takes and how it shares the machine."""

    body_bytes: int = 16 * 2**20
    """Of one request: a photograph of a phone, or a few."""
    bodies_bytes: int = 256 * 2**20
    """Of all requests and unread answers together, so that many clients do not fill the memory."""
    body_values: int = 500_000
    """That a JSON body lists, told by its commas before it is read: 32 faces as numbers fit."""
    body_lists: int = 150_000
    """Of a JSON body, which cost more to read than values do: 32 faces have 133,000."""
    head_seconds: float = 10.0
    """For a request's headers to arrive."""
    body_seconds: float = 20.0
    """For its body to arrive, and for each 48 KiB of the answer to be taken."""
    answer_seconds: float = 90.0
    """From the whole body to the last byte of the answer; then the work ends too."""
    connections: int = 1024
    """Open at once; whoever comes on one more is answered by 503, and that one closed."""
    in_flight: int = 512
    """Requests being answered at once, whatever they ask for."""
    queued: int = 256
    """Requests that wait for the network, of predictions and of explanations each."""
    file_pixels: int = 24_000_000
    """Of all picture files of a request, told from their headers before any is decoded."""
    answer_values: int = 1_000_000
    """Values of all pictures of one answer: 1,275 digits, 81 faces."""
    pass_values: int = 400_000
    """Requests are joined up to so many values of pictures, so that nobody waits long."""
    part_values: int = 100_352
    """That go through the network at once on one thread: 128 digits. A core alone is fastest with
    32, but every part also costs the other threads the interpreter's lock."""
    part_pictures: int = 4
    """At least, however large they are."""
    join_seconds: float = 0.004
    """How long an idle network waits for requests to join."""
    passes: int = 2
    """Joined explanations under way at once, so that a small one need not wait for a large one."""
    threads: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    """That evaluate the network, one core each: more threads on one batch wait for each other."""
    hosts: tuple[str, ...] = ()
    """Names the service answers to; none for any. Keeps other sites' names off a loopback."""
