"""The service itself: decodes what is given, joins it with what others ask, draws the answers."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ecinn.data.photographs import Photograph
from ecinn.errors import EcinnError, InputError
from ecinn.explanation.result import Explanation
from ecinn.pixels import to_pixels
from ecinn.web import answers, schemas
from ecinn.web.batching import Batcher, Bounds, Wanted
from ecinn.web.catalogue import Catalogue, Served
from ecinn.web.metrics import Metrics
from ecinn.web.network import PartedNetwork
from ecinn.web.passes import Pixels, Question, Reading, explain_jointly, read_jointly
from ecinn.web.settings import Settings
from ecinn.web.uploads import TooLargeError, decode_base64, read_pictures, read_pixels

Result = TypeVar("Result")
FILM_FRAMES = 22
"""Besides the tipping point and the convincing picture: 24 as `ecinn explain --film` has."""


class UnknownError(EcinnError):
    """There is no model or sample of that name."""


class Service:
    """Models behind two queues: predictions are quick and never wait for explanations."""

    def __init__(self, catalogue: Catalogue, settings: Settings, metrics: Metrics) -> None:
        self.catalogue, self.settings, self.metrics = catalogue, settings, metrics
        self._network = ThreadPoolExecutor(settings.threads, "ecinn-network")
        # Of their own, so that a picture to be read never waits for others to be drawn.
        self._decoding = ThreadPoolExecutor(settings.threads, "ecinn-decoding")
        self._drawing = ThreadPoolExecutor(settings.threads, "ecinn-drawing")
        self.predictions: Batcher[tuple[Served, Pixels], Reading] = Batcher(
            self._read,
            self._bounds(workers=1),
            key=lambda asked: asked[0].name,
            cost=lambda asked: asked[1].numel(),
            observe=metrics.observe_pass("predict"),
        )
        self.explanations: Batcher[tuple[Served, Question], Explanation] = Batcher(
            self._explain,
            self._bounds(workers=settings.passes),
            key=lambda asked: asked[0].name,
            cost=lambda asked: self._cost(*asked),
            observe=metrics.observe_pass("explain"),
        )
        metrics.watch_queue("predict", lambda: self.predictions.waiting)
        metrics.watch_queue("explain", lambda: self.explanations.waiting)

    def start(self) -> None:
        """Begin to work; in a running event loop."""
        self.predictions.start()
        self.explanations.start()

    async def close(self) -> None:
        """Finish what is being computed, and end all threads."""
        await self.predictions.close()
        await self.explanations.close()
        for threads in (self._network, self._decoding, self._drawing):
            await asyncio.to_thread(threads.shutdown)

    @property
    def waiting(self) -> int:
        """Requests that wait for the network."""
        return self.predictions.waiting + self.explanations.waiting

    def find(self, name: str) -> Served:
        """A model that was loaded at the start."""
        if name not in self.catalogue:
            known = ", ".join(self.catalogue)
            raise UnknownError(f"no model of that name is served; there are: {known}")
        return self.catalogue[name]

    def sample(self, served: Served, index: int) -> UInt8[Tensor, "channels height width"]:
        """A test image."""
        count = 0 if served.samples is None else len(served.samples)
        if served.samples is None or not 0 <= index < count:
            there = f"its test images are 0 to {count - 1}" if count else "it has no test images"
            raise UnknownError(f"{served.name} has no such sample: {there}")
        return served.samples.images[index]

    async def predict(self, request: schemas.PredictRequest) -> dict[str, Any]:
        """What the classifier says of every picture."""
        served = self.find(request.model)
        pixels = await self.pixels(served, request.images)
        reading = await self.predictions.submit((served, pixels))
        return {"model": served.name, "predictions": answers.predictions(reading)}

    async def explain(self, request: schemas.ExplainRequest) -> dict[str, Any]:
        """All that is known of every picture and target, with its pictures."""
        if request.frames and request.alphas is not None:
            raise InputError("frames and alphas are two ways to ask for a path: leave one out")
        served = self.find(request.model)
        question = _question(request, _blank(served, len(request.images)))
        self._check_cost(served, question)
        pixels = await self.pixels(served, request.images)
        explanation = await self.ask(served, replace(question, pixels=pixels))
        drawn = await self.draw(answers.explanations, explanation)
        return {"model": served.name, "explanations": drawn}

    async def sheet(self, request: schemas.SheetRequest) -> bytes:
        """The explanation sheet as a PNG."""
        served = self.find(request.model)
        pixels = await self.pixels(served, [request.image])
        asked = request.confidence
        question = Question(pixels, _targets(request.targets), asked, asked is not None)
        return await self.draw(answers.sheet, await self.ask(served, question))

    async def film(self, request: schemas.FilmRequest) -> bytes:
        """The path there and back as a GIF."""
        served = self.find(request.model)
        pixels = await self.pixels(served, [request.image])
        asked = request.confidence
        question = Question(
            pixels, (request.target,), asked, asked is not None, frames=FILM_FRAMES
        )
        return await self.draw(answers.film, await self.ask(served, question))

    async def files(
        self,
        served: Served,
        files: Sequence[bytes],
        targets: Sequence[int] | str | None,
        confidence: float | None,
    ) -> bytes:
        """A zip of all files of an explanation."""
        question = Question(_blank(served, len(files)), _targets(targets), confidence)
        self._check_cost(served, question)
        most = self.settings.file_pixels
        pictures = await self.decode(read_pictures, files, served.model, most)
        pixels = to_pixels(torch.stack([picture.image for picture in pictures]))
        explanation = await self.ask(served, replace(question, pixels=pixels))
        notes = [picture.notes for picture in pictures]
        return await self.draw(answers.archive, explanation, notes)

    async def ask(self, served: Served, question: Question) -> Explanation:
        """The explanation, computed together with what others ask."""
        self._check_cost(served, question)
        return await self.explanations.submit((served, question))

    async def pixels(self, served: Served, images: Sequence[schemas.GivenImage]) -> Pixels:
        """The pictures as the model reads them, checked and decoded off the event loop."""
        files = [image.png for image in images if isinstance(image, schemas.PictureFile)]

        def read() -> list[Photograph]:
            data = [decode_base64(file) for file in files]
            return read_pictures(data, served.model, self.settings.file_pixels)

        photographs = iter(await self.decode(read) if files else [])

        def one(image: schemas.GivenImage) -> Tensor:
            if isinstance(image, schemas.Sample):
                return self.sample(served, image.sample)
            if isinstance(image, schemas.PictureFile):
                return next(photographs).image
            return read_pixels(image.pixels, served.model.classifier.image_shape)

        def every() -> Pixels:
            return to_pixels(torch.stack([one(image) for image in images]))

        if any(isinstance(image, schemas.PixelValues) for image in images):
            return await asyncio.to_thread(every)
        return every()

    async def decode(self, work: Callable[..., Result], *given: Any) -> Result:  # noqa: ANN401
        """Read picture files off the event loop, on few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._decoding, work, *given)

    async def draw(self, work: Callable[..., Result], *given: Any) -> Result:  # noqa: ANN401
        """Make pictures off the event loop, on few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._drawing, work, *given)

    def _read(
        self, asked: Sequence[tuple[Served, Tensor]], wanted: Wanted
    ) -> Sequence[Reading | InputError]:
        served = asked[0][0]
        network = PartedNetwork(served.model.classifier, self._part(served), wanted=wanted)
        return read_jointly(served.model, network, [pixels for _, pixels in asked])

    def _explain(
        self, asked: Sequence[tuple[Served, Question]], wanted: Wanted
    ) -> Sequence[Explanation | InputError]:
        served = asked[0][0]
        network = PartedNetwork(served.model.classifier, self._part(served), self._network, wanted)
        return explain_jointly(served.model, network, [question for _, question in asked])

    def _part(self, served: Served) -> int:
        return max(self.settings.part_pictures, self.settings.part_values // served.values)

    def _bounds(self, workers: int) -> Bounds:
        s = self.settings
        return Bounds(s.queued, s.pass_values, s.join_seconds, workers)

    def _cost(self, served: Served, question: Question) -> int:
        return served.values * question.pictures(len(served.model.class_names))

    def _check_cost(self, served: Served, question: Question) -> None:
        most, cost = self.settings.answer_values, self._cost(served, question)
        if cost > most:
            raise TooLargeError(
                f"the answer would hold {cost / most:.1f} times as many pictures as are made at "
                "once: ask for fewer images, targets or frames"
            )


def _blank(served: Served, images: int) -> Pixels:
    """So many pictures without memory, to reckon with before they are decoded."""
    return torch.zeros(()).expand(images, *served.model.classifier.image_shape)


def _question(request: schemas.ExplainRequest, pixels: Pixels) -> Question:
    return Question(
        pixels,
        _targets(request.targets),
        request.confidence,
        request.correct,
        request.frames,
        None if request.alphas is None else tuple(request.alphas),
    )


def _targets(targets: Sequence[int] | str | None) -> Any:  # noqa: ANN401
    """As `Question` has them; a class asked for twice is explained once."""
    if targets is None or isinstance(targets, str):
        return targets
    return tuple(dict.fromkeys(targets))
