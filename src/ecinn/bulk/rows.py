"""One row for every picture and target: a counterfactual with its certificate, or an error."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, repeat
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import IN_WORDS, REASONS
from ecinn.data.streams import Item
from ecinn.drawing.pictures import image_array, png_bytes, to_image
from ecinn.errors import EcinnError, InputError
from ecinn.explanation.counterfactual import Known, explain
from ecinn.explanation.files import to_dict
from ecinn.explanation.result import Confidence, Explanation
from ecinn.explanation.targets import given_targets
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8

PAIRS = {"cpu": 128, "cuda": 2048}
"""Pictures times targets that are explained at once; on a CPU more of them are not faster."""
IMAGE = (
    "posterior", "answer", "log_p", "typical", "out_of_distribution", "round_trip_error", "notes",
)  # fmt: skip
TARGET = (
    "alpha", "alpha_0", "alpha_1", "reachable", "highest", "as_requested", "explained", "tied",
    "bent", "queries", "corrections", "passes", "third_class",
)  # fmt: skip
"""Keys of the JSON of an explanation that become columns, besides its certificates."""
OVERFLOWS = "unlike all training images: the network overflows"
Row = dict[str, Any]
Read = tuple[Tensor, tuple[str, ...]] | str
"""Pixels and notes of a picture, or why it cannot be read."""


@dataclass(frozen=True)
class Request:
    """Options of an explanation, the same for every picture."""

    targets: tuple[int, ...] | Literal["all"] = "all"
    confidence: Confidence | None = None
    """None for the model's default."""
    check: bool = True
    correct: bool = False
    tipping_point: bool = False
    """Store the tipping points as pictures too."""

    def count(self, classes: int) -> int:
        """Number of targets of every picture."""
        return classes - 1 if self.targets == "all" else len(self.targets)


class Explainer:
    """Turns pictures into rows; `notes` says once if memory was short."""

    def __init__(self, model: Model, request: Request) -> None:
        self.model, self.request = model, request
        self.batch = max(1, PAIRS[model.device.type] // request.count(len(model.class_names)))
        self.notes: tuple[str, ...] = ()

    def rows(self, items: Iterable[Item], report: Callable[[int], object]) -> list[Row]:
        """Explain all pictures; one that cannot be read becomes a row with an error.

        Args:
            report: is told how many pictures of each batch are done.
        """
        found: list[Row] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for keys, read in self._decoded(pool, iter(items)):
                explained = iter(self._explained(pool, [r for r in read if isinstance(r, tuple)]))
                for key, each in zip(keys, read, strict=True):
                    rows = next(explained) if isinstance(each, tuple) else self._unread(each)
                    found += [{"key": _text(key), **row} for row in rows]
                report(len(keys))
        return found

    def _decoded(
        self, pool: Executor, items: Iterator[Item]
    ) -> Iterator[tuple[list[str], list[Read]]]:
        """Yield batches of keys and pictures, which are decoded one batch ahead."""
        waiting: deque[list[tuple[str, Future[Read]]]] = deque()
        more = True
        while more or waiting:
            batch = [(key, self._submit(pool, load)) for key, load in islice(items, self.batch)]
            more = bool(batch)
            if more:
                waiting.append(batch)
            if waiting and (len(waiting) > 1 or not more):
                keys, futures = zip(*waiting.popleft(), strict=True)
                yield list(keys), [future.result() for future in futures]

    def _submit(self, pool: Executor, load: Callable[[], Any]) -> Future[Read]:
        """Read a file here and now, and decode it in a thread."""
        try:
            return pool.submit(self._decode, load())
        except Exception as failure:  # a damaged member of an archive; others may be readable
            return pool.submit(_reason, failure)

    def _decode(self, source: Any) -> Read:  # noqa: ANN401
        try:
            if isinstance(source, np.ndarray):
                return self.model.pixels(source), ()
            photograph = self.model.photograph(source)
        except Exception as failure:  # decoders raise errors of all kinds
            return _reason(failure)
        return to_pixels(photograph.image[None]), photograph.notes

    def _unread(self, reason: str) -> list[Row]:
        """Return a row for every target, or one row if the targets depend on the prediction."""
        names, targets = self.model.class_names, self.request.targets
        asked = [None] if targets == "all" else [names[target] for target in targets]
        return [{"target": target, "error": reason} for target in asked]

    def _explained(self, pool: Executor, read: list[Any]) -> list[list[Row]]:
        """Explain pictures, in smaller batches where the GPU's memory is too small."""
        found: list[list[Row]] = []
        while len(found) < len(read):
            batch = read[len(found) : len(found) + self.batch]
            try:
                found += self._explain(pool, *zip(*batch, strict=True))
                continue
            except torch.OutOfMemoryError:
                pass  # beyond this clause its tensors are released
            if len(batch) == 1:
                raise EcinnError("the GPU's memory is too small for one picture: use --device cpu")
            self.batch = len(batch) // 2
            self.notes = ("the GPU's memory is too small for large batches: using smaller ones",)
            torch.cuda.empty_cache()
        return found

    @torch.inference_mode()
    def _explain(
        self, pool: Executor, pixels: tuple[Tensor, ...], remarks: tuple[tuple[str, ...], ...]
    ) -> list[list[Row]]:
        """Return the rows of every picture, in the order of its targets."""
        model, names, request = self.model, self.model.class_names, self.request
        x = torch.cat([each.to(model.device) for each in pixels])
        z, log_det = model.encode_with_log_det(x)
        answers = None if model.reader is None else model.reader.predict(to_uint8(x)).to(z)
        p = equations.predicted_class(z, model.mu) if answers is None else answers.argmax(1)
        asked = "all" if request.targets == "all" else list(request.targets)
        q = given_targets(asked, p, len(names))
        own = q == p[:, None]
        rows: list[list[Row]] = [
            [{"predicted": names[predicted], "target": names[target]} for target in targets]
            for predicted, targets in zip(p.tolist(), q.tolist(), strict=True)
        ]
        if bool(own.any()):
            picture, place = own.nonzero().T
            answered = None if answers is None else answers[picture]
            made = [remarks[n] for n in picture.tolist()]
            known = _known(model, z[picture], log_det[picture], p[picture], answered, made)
            for n, m, about in zip(picture.tolist(), place.tolist(), known, strict=True):
                rows[n][m] |= {"error": f"already predicted as {rows[n][m]['target']}", **about}
        # Pictures that are predicted as a target have one target less than the others.
        for has_own in (False, True):
            chosen = (own.any(1) == has_own).nonzero()[:, 0]
            others = q[chosen][~own[chosen]]
            if not len(others):
                continue
            read = None if answers is None else answers[chosen]
            e = explain(
                model,
                model.mu_bar,
                x[chosen],
                others.reshape(len(chosen), -1),
                confidence=model.request(request.confidence)[0],
                check=request.check,
                correct=request.correct,
                ood=model.ood,
                class_names=names,
                reader=model.reader,
                known=Known(z[chosen], log_det[chosen], read),
            )
            places = chosen.tolist()
            said = tuple(remarks[place] for place in places)
            e = replace(e.cpu(), remarks=said, planted=model.recipe.planted)
            pairs = _rows(pool, e, tipping_point=request.tipping_point)
            for row in (row for place in places for row in rows[place] if "error" not in row):
                row |= next(pairs)
        return rows


def _known(
    model: Model,
    z: Float[Tensor, "batch dim"],
    log_det: Float[Tensor, " batch"],
    p: Int[Tensor, " batch"],
    answers: Float[Tensor, "batch classes"] | None,
    remarks: Sequence[tuple[str, ...]],
) -> Iterator[Row]:
    """Yield what each picture's latent says about it, so that no network is evaluated."""
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, model.mu))
    flags = model.ood.flags(z, z - model.mu_bar[p], log_p)
    read = {"posterior": equations.log_posterior(z, model.mu, model.tau).exp()}
    if answers is not None:
        read["answer"] = answers
    for n, (density, flagged) in enumerate(zip(log_p.tolist(), flags.tolist(), strict=True)):
        if not isfinite(density):
            yield {"error": OVERFLOWS}
            continue
        reasons = [reason for reason, flag in zip(REASONS, flagged, strict=True) if flag]
        why = ", ".join(IN_WORDS[reason] for reason in reasons)
        row: Row = {"log_p": density, "typical": not reasons, "out_of_distribution": reasons}
        row["notes"] = [*remarks[n], *([f"out of distribution: {why}"] if reasons else [])]
        for key, values in read.items():
            row[key] = dict(zip(model.class_names, values[n].tolist(), strict=True))
        yield row


def _reason(failure: Exception) -> str:
    if isinstance(failure, InputError):
        return _text(str(failure))
    return _text(f"the image cannot be read ({type(failure).__name__}: {failure})")


def _text(text: str) -> str:
    """Escape the bytes of names that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _rows(pool: Executor, e: Explanation, *, tipping_point: bool) -> Iterator[Row]:
    """Yield a row for every pair: the keys of the JSON of an explanation, and PNG files."""
    finite = (e.convincing.isfinite().flatten(2).all(2) & e.log_p.isfinite()[:, None]).flatten()
    images = to_dict(e)["images"]
    pairs = [(image, target) for image in images for target in image["targets"]]
    pictures = pool.map(_png, e.stored_convincing.flatten(0, 1))
    tips = pool.map(_png, e.stored_tipping_point.flatten(0, 1)) if tipping_point else repeat(None)
    for (image, target), good, picture, tip in zip(pairs, finite.tolist(), pictures, tips):  # noqa: B905
        if not good:
            yield {"error": OVERFLOWS}
            continue
        yield {
            **{key: image[key] for key in IMAGE if key in image},
            **{key: target[key] for key in TARGET if key in target},
            **({"tipping_point": tip} if tipping_point else {}),
            "counterfactual": picture,
            "certificate": target["convincing"],
            "tipping_certificate": target["tipping_point"],
        }


def _png(image: UInt8[Tensor, "channels height width"]) -> bytes:
    return png_bytes(to_image(image_array(image)))
