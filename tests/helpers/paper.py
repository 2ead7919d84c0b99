"""Builders and readers for tests of the paper's figures and claims."""

import contextlib
import dataclasses
import re
import zlib

from torch import Tensor

from ecinn.metrics.statistics import Interval
from ecinn.pixels import to_pixels
from ecinn.studies.paper.measuring import Sample

N = 48
"""Digits of the fixture `sample`."""


def with_counterfactuals(sample: Sample, images: Tensor) -> Sample:
    """Replace the convincing counterfactuals of a sample by these 8-bit images."""
    (part,) = sample.parts
    part = dataclasses.replace(part, convincing=to_pixels(images)[:, None])
    return dataclasses.replace(sample, parts=(part,))


def count(share: Interval) -> int:
    """Return k of a share k/n."""
    return round(share.mean * share.n)


def pdf_contents(data: bytes) -> bytes:
    """Return the decompressed streams of all pages."""
    contents = b""
    for start in re.finditer(rb"stream\r?\n", data):
        with contextlib.suppress(zlib.error):
            content = zlib.decompressobj().decompress(data[start.end() :])
            # Pages begin with their colour space; images and fonts do not.
            contents += content if b"/DeviceRGB" in content[:40] else b""
    return contents


def pdf_text(data: bytes) -> str:
    """Return all text that the pages show."""
    words = b""
    for shown in re.findall(rb"\[(.*?)\]\s+TJ|(\(.*?\))\s+Tj", pdf_contents(data), re.DOTALL):
        words += b"".join(re.findall(rb"\((.*?)(?<!\\)\)", b"".join(shown), re.DOTALL))
    return words.replace(b"\0", b"").decode("latin1")
