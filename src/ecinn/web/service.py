"""The service: decodes images, batches requests and builds the answers, off the event loop."""

import asyncio
import contextlib
import ctypes
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from ecinn.data.photographs import Photograph
from ecinn.errors import EcinnError, InputError
from ecinn.explanation.result import ALPHA_1, Confidence, Explanation
from ecinn.pixels import Images, to_pixels
from ecinn.web import answers, schemas
from ecinn.web.batching import Batcher, FullError, Wanted
from ecinn.web.catalogue import Catalogue, ServedModel
from ecinn.web.clients import CLIENT, Shares
from ecinn.web.metrics import Metrics
from ecinn.web.passes import (
    Network,
    Prediction,
    Question,
    explain_jointly,
    predict_jointly,
    split_network,
)
from ecinn.web.settings import Settings
from ecinn.web.uploads import TooLargeError, decode_base64, read_images, read_pixels

Readable = tuple[Images, tuple[tuple[str, ...], ...]]
"""Images as a model reads them, and what was done to each."""
GivenImage = schemas.GivenImage | bytes
"""An image of a JSON request, or an uploaded file."""
FILM_FRAMES = 22
"""Besides the tipping point and the convincing image: 24 as in `ecinn explain --film`."""
TRIM_SECONDS = 5.0
"""Time between looks for memory to return to the system."""


class UnknownError(EcinnError):
    """A model or test image does not exist."""


class Service:
    """Models behind queues, so that predictions never wait for explanations."""

    def __init__(self, catalogue: Catalogue, settings: Settings, metrics: Metrics) -> None:
        self.catalogue, self.settings = catalogue, settings
        # Separate threads, so that decoding an image never waits for drawing others.
        self._network = ThreadPoolExecutor(settings.threads, "ecinn-network")
        self._drawing = ThreadPoolExecutor(settings.threads, "ecinn-drawing")
        self._worked = False
        self._explaining = Shares(settings.client_explanations)
        self.decodings: Batcher[Callable[[], Readable], Readable] = Batcher(
            _call,
            settings,
            settings.threads,
            key=None,
            observe=metrics.watch("decode", lambda: self.decodings.waiting),
            queued=settings.decodings,
        )
        self.predictions: Batcher[tuple[ServedModel, Images], Prediction] = Batcher(
            self._predict,
            settings,
            key=lambda request: request[0].name,
            cost=lambda request: request[1].numel(),
            observe=metrics.watch("predict", lambda: self.predictions.waiting),
        )
        self.explanations: Batcher[tuple[ServedModel, Question], Explanation] = Batcher(
            self._explain,
            settings,
            settings.passes,
            key=lambda request: request[0].name,
            cost=lambda request: _cost(*request),
            observe=metrics.watch("explain", lambda: self.explanations.waiting),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work; on leaving, finish the work in progress and stop all threads."""
        queues = self.decodings, self.predictions, self.explanations
        trimming = asyncio.create_task(self._trim())
        async with queues[0].running(), queues[1].running(), queues[2].running():
            yield
        trimming.cancel()
        for threads in (self._network, self._drawing):
            await asyncio.to_thread(threads.shutdown)

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        """Note at the end that there is memory to return."""
        try:
            yield
        finally:
            self._worked = True

    async def _trim(self) -> None:
        """Return freed memory to the system after work, which the C library would keep."""
        trim = _malloc_trim()
        while trim is not None:
            await asyncio.sleep(TRIM_SECONDS)
            if self._worked and not self.waiting:
                self._worked = False
                await asyncio.to_thread(trim, 0)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the network, or for their images to be decoded."""
        queues = self.decodings, self.predictions, self.explanations
        return sum(queue.waiting for queue in queues)

    def find(self, name: str) -> ServedModel:
        """Return the model of that name."""
        if name not in self.catalogue:
            known = ", ".join(self.catalogue)
            raise UnknownError(f"no model of that name is served; there are: {known}")
        return self.catalogue[name]

    def sample(self, served: ServedModel, index: int) -> UInt8[Tensor, "channels height width"]:
        """Return a test image."""
        count = 0 if served.samples is None else len(served.samples)
        if served.samples is None or not 0 <= index < count:
            known = f"its test images are 0 to {count - 1}" if count else "it has no test images"
            raise UnknownError(f"{served.name} has no such sample: {known}")
        return served.samples.images[index]

    async def predict(self, request: schemas.PredictRequest) -> bytes:
        """Predict every image; return JSON."""
        served = self.find(request.model)
        with self._work():
            pixels, _ = await self._read(served, request.images)
            prediction = await self.predictions.submit((served, pixels))
        images = answers.predictions(prediction, served.model.class_names)
        return answers.to_json({"model": served.name, "images": images})

    async def explain(self, request: schemas.ExplainRequest) -> bytes:
        """Explain every image; return JSON with pictures."""
        path = tuple(request.path) if isinstance(request.path, list) else request.path
        options = (request.targets, request.confidence, request.correct, path)
        return await self._draw(answers.explanation, request.model, request.images, *options)

    async def sheet(self, request: schemas.SheetRequest) -> bytes:
        """Draw the explanation sheet as a PNG."""
        options = (request.targets, request.confidence, self._corrects(request))
        return await self._draw(answers.sheet, request.model, [request.image], *options)

    async def film(self, request: schemas.FilmRequest) -> bytes:
        """Draw the path, forwards and backwards, as a GIF."""
        correct = self._corrects(request)
        options = ([request.target], request.confidence, correct, FILM_FRAMES)
        return await self._draw(answers.film, request.model, [request.image], *options)

    async def files(
        self,
        model: str,
        files: Sequence[tuple[str, bytes]],
        targets: Sequence[int | str] | str | None,
        confidence: Confidence | None,
        *,
        correct: bool = False,
    ) -> bytes:
        """Explain named image files; return a zip of files."""
        names, data = [name for name, _ in files], [file for _, file in files]
        options = (targets, confidence, correct, None, names)
        return await self._draw(answers.archive, model, data, *options)

    def _corrects(self, request: schemas.SheetRequest | schemas.FilmRequest) -> bool:
        """Return whether α is corrected: where a confidence is requested, also by default."""
        return self.find(request.model).model.request(request.confidence)[0] != ALPHA_1

    async def _draw(
        self,
        draw: Callable[[Explanation], bytes],
        model: str,
        images: Sequence[GivenImage],
        targets: Sequence[int | str] | str | None,
        confidence: Confidence | None,
        correct: bool = False,  # noqa: FBT001, FBT002
        path: int | tuple[float, ...] | None = None,
        names: Sequence[str] = (),
    ) -> bytes:
        """Explain in a batch with other requests, and draw the answer in a thread."""
        served = self.find(model)
        chosen: Any = targets
        if targets is not None and not isinstance(targets, str):
            chosen = tuple(dict.fromkeys(served.model.targets(targets)))
        # Takes no memory, but has the size of the images that are not decoded yet.
        pixels = torch.zeros(()).expand(len(images), *served.model.image_shape)
        question = Question(pixels, chosen, confidence, correct, path)
        excess = _cost(served, question) / self.settings.answer_values
        if excess > 1:
            raise TooLargeError(
                f"the answer would have {excess:.1f} times the allowed number of images: "
                "ask for fewer images, targets or frames"
            )
        too_many = FullError(2, "client_explanations", "of your explanations")
        with self._explaining.one(CLIENT.get(), too_many), self._work():
            pixels, remarks = await self._read(served, images, names)
            question = dataclasses.replace(question, pixels=pixels)
            e = await self.explanations.submit((served, question))
            remarks = tuple(remarks[index] for index in e.indices.tolist())
            e = dataclasses.replace(e, model=served.name, remarks=remarks)
            if names:
                sources = tuple(names[index] for index in e.indices.tolist())
                skipped = tuple(
                    dataclasses.replace(each, source=names[each.index]) for each in e.skipped
                )
                e = dataclasses.replace(e, sources=sources, skipped=skipped)
            return await asyncio.get_running_loop().run_in_executor(self._drawing, draw, e)

    async def _read(
        self, served: ServedModel, images: Sequence[GivenImage], names: Sequence[str] = ()
    ) -> Readable:
        """Return the images of a request as the model reads them, and what was done to them."""
        files = [image for image in images if isinstance(image, bytes | schemas.ImageFile)]

        def read_all() -> Readable:
            data = [file if isinstance(file, bytes) else decode_base64(file.png) for file in files]
            limits = self.settings.file_pixels, self.settings.file_aspect
            decoded = iter(read_images(data, served.model, *limits, names))

            def read(image: GivenImage) -> Photograph:
                if isinstance(image, schemas.Sample):
                    return Photograph(self.sample(served, image.sample), ())
                if isinstance(image, schemas.PixelValues):
                    return Photograph(read_pixels(image.pixels, served.model.image_shape), ())
                return next(decoded)

            photographs = [read(image) for image in images]
            pixels = to_pixels(torch.stack([photograph.image for photograph in photographs]))
            return pixels, tuple(photograph.notes for photograph in photographs)

        if files:
            return await self.decodings.submit(read_all)
        if all(isinstance(image, schemas.Sample) for image in images):
            return read_all()  # faster than a thread would start
        return await asyncio.to_thread(read_all)

    def _predict(
        self, requests: Sequence[tuple[ServedModel, Images]], wanted: Wanted
    ) -> Sequence[Prediction | InputError]:
        served = requests[0][0]
        network = self._split(served, wanted)
        return predict_jointly(served.model, network, [pixels for _, pixels in requests])

    def _explain(
        self, requests: Sequence[tuple[ServedModel, Question]], wanted: Wanted
    ) -> Sequence[Explanation | InputError]:
        served = requests[0][0]
        network = self._split(served, wanted, self._network)
        return explain_jointly(served.model, network, [question for _, question in requests])

    def _split(
        self, served: ServedModel, wanted: Wanted, threads: Executor | None = None
    ) -> Network:
        values = math.prod(served.model.image_shape)
        size = max(self.settings.part_images, self.settings.part_values // values)
        return split_network(served.model, size, threads, wanted)


def _call(reads: Sequence[Callable[[], Readable]], _: Wanted) -> Sequence[Readable | Exception]:
    return [read() for read in reads]


def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc, or None for other C libraries."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def _cost(served: ServedModel, question: Question) -> int:
    return question.cost(len(served.model.class_names))
