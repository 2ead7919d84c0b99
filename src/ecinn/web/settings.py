"""Limits of the service, each with the reason for it."""

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ecinn.errors import InputError

MAX_IMAGES = 32
"""Images of one request."""
MAX_FRAMES = 61
"""Frames of one path, besides the tipping point and the convincing counterfactual."""
MAX_ALPHA = 5.0
"""Far beyond α₁ the decoder shows nothing recognisable."""
MAX_ROWS = 256
"""Rows of an image that is given as numbers."""
TOKEN = "ECINN_TOKEN"
PREFIX = "ECINN_SERVE_"
"""Start of the environment variables that set limits, such as ECINN_SERVE_CONNECTIONS."""
KUBERNETES = f"{PREFIX}(SERVICE|PORT)(_|$)"
"""Variables that Kubernetes sets for a service called ecinn-serve."""


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
    idle_seconds: int = 5
    """Time that a connection stays open without a request."""
    connections: int = 1024
    """Open connections; one more is answered with 503 and closed."""
    client_connections: int = 64
    """Open connections of one client; one more is answered with 429 and closed."""
    in_flight: int = 512
    """Requests in progress, of any kind."""
    client_in_flight: int = 32
    """Requests of one client in progress, of any kind."""
    client_bytes: int = 64 * 2**20
    """Size of all requests and unread answers of one client together."""
    queued: int = 256
    """Requests that wait for the network, for predictions and explanations each."""
    client_explanations: int = 16
    """Explanations of one client in progress: a class behind one address draws at once."""
    decodings: int = 64
    """Requests whose image files wait to be decoded."""
    file_pixels: int = 24_000_000
    """Largest total number of pixels of a request's image files, checked before decoding."""
    file_aspect: int = 20
    """Largest ratio of an image file's sides, checked before decoding: panoramas have 10."""
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
    """Accepted host names, besides loopback names and the address that a client connected to.
    Others are refused, which protects from DNS rebinding."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose X-Forwarded-For names the client."""


def read_settings(given: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read settings as NAME=VALUE, and those not given from the environment.

    Values of `hosts` and `trusted_proxies` are separated by commas. The token of the environment
    is checked here too, before models are loaded.

    >>> read_settings(["connections=9"], {"ECINN_SERVE_HOSTS": "a.example,b.example"}).hosts
    ('a.example', 'b.example')
    """
    check_token(environment.get(TOKEN) or None)
    kinds = {field.name: field.type for field in fields(Settings)}
    limits = {f"{PREFIX}{name.upper()}": name for name in kinds}
    texts = {}
    for variable, text in environment.items():
        if variable in limits and text:
            texts[limits[variable]] = text
        elif variable.startswith(PREFIX) and text and not re.match(KUBERNETES, variable):
            raise InputError(f"{variable} is not a setting; there are: {', '.join(limits)}")
    for setting in given:
        name, _, text = setting.partition("=")
        if name not in kinds:
            raise InputError(f"there is no limit {name!r}; there are: {', '.join(kinds)}")
        texts[name] = text
    return Settings(**{name: _value(name, text, kinds[name]) for name, text in texts.items()})


def check_token(token: str | None) -> None:
    """Refuse tokens that clients would send in different bytes, or not at all."""
    if token is not None and not re.fullmatch("[!-~]([ -~]*[!-~])?", token):
        raise InputError(
            f"the token ({TOKEN}) must be printable ASCII without spaces around it: choose another"
        )


def _value(name: str, text: str, kind: Any) -> Any:  # noqa: ANN401
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not (value > 0 and math.isfinite(value)):
            whole = "a whole number" if kind is int else "a number"
            raise InputError(f"the limit {name} is {whole} above 0, not {text!r}")
        return value
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "trusted_proxies":
        for proxy in values:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise InputError(
                    f"a proxy is an address or network such as 10.0.0.0/8, not {proxy!r}"
                ) from None
    return values
