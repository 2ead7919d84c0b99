"""The service: decodes images, batches requests and builds the answers, off the event loop."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ecinn.errors import EcinnError, InputError
from ecinn.explanation.result import Explanation
from ecinn.pixels import Images, to_pixels
from ecinn.web import answers, schemas
from ecinn.web.batching import Batcher, Bounds, Wanted
from ecinn.web.catalogue import Catalogue, ServedModel
from ecinn.web.metrics import Metrics
from ecinn.web.passes import (
    Prediction,
    Question,
    SplitNetwork,
    explain_jointly,
    predict_jointly,
)
from ecinn.web.settings import Settings
from ecinn.web.uploads import TooLargeError, decode_base64, read_images, read_pixels

Result = TypeVar("Result")
FILM_FRAMES = 22
"""Besides the tipping point and the convincing image: 24 as in `ecinn explain --film`."""


class UnknownError(EcinnError):
    """A model or test image does not exist."""


class Service:
    """Models behind two queues, so that predictions never wait for explanations."""

    def __init__(self, catalogue: Catalogue, settings: Settings, metrics: Metrics) -> None:
        self.catalogue, self.settings, self.metrics = catalogue, settings, metrics
        self._network = ThreadPoolExecutor(settings.threads, "ecinn-network")
        # Separate threads, so that decoding an image never waits for drawing others.
        self._decoding = ThreadPoolExecutor(settings.threads, "ecinn-decoding")
        self._drawing = ThreadPoolExecutor(settings.threads, "ecinn-drawing")
        self.predictions: Batcher[tuple[ServedModel, Images], Prediction] = Batcher(
            self._predict,
            self._bounds(workers=1),
            key=lambda request: request[0].name,
            cost=lambda request: request[1].numel(),
            observe=metrics.observe_pass("predict"),
        )
        self.explanations: Batcher[tuple[ServedModel, Question], Explanation] = Batcher(
            self._explain,
            self._bounds(workers=settings.passes),
            key=lambda request: request[0].name,
            cost=lambda request: self._cost(*request),
            observe=metrics.observe_pass("explain"),
        )
        metrics.watch_queue("predict", lambda: self.predictions.waiting)
        metrics.watch_queue("explain", lambda: self.explanations.waiting)

    def start(self) -> None:
        """Start to work, in a running event loop."""
        self.predictions.start()
        self.explanations.start()

    async def close(self) -> None:
        """Finish the work in progress and stop all threads."""
        await self.predictions.close()
        await self.explanations.close()
        for threads in (self._network, self._decoding, self._drawing):
            await asyncio.to_thread(threads.shutdown)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the network."""
        return self.predictions.waiting + self.explanations.waiting

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

    async def predict(self, request: schemas.PredictRequest) -> dict[str, Any]:
        """Predict every image."""
        served = self.find(request.model)
        pixels = await self._pixels(served, request.images)
        prediction = await self.predictions.submit((served, pixels))
        images = answers.predictions(prediction, served.model.class_names)
        return {"model": served.name, "images": images}

    async def explain(self, request: schemas.ExplainRequest) -> dict[str, Any]:
        """Explain every image; the answer contains pictures."""
        served = self.find(request.model)
        question = Question(
            _placeholder(served, len(request.images)),
            _targets(served, request.targets),
            request.confidence,
            request.correct,
            tuple(request.path) if isinstance(request.path, list) else request.path,
        )
        self._check_cost(served, question)
        pixels = await self._pixels(served, request.images)
        e = await self._ask(served, dataclasses.replace(question, pixels=pixels))
        return await self.draw(answers.explanation, e)

    async def sheet(self, request: schemas.SheetRequest) -> bytes:
        """Draw the explanation sheet as a PNG."""
        served = self.find(request.model)
        targets = _targets(served, request.targets)
        return await self._draw_one(answers.sheet, served, request, targets)

    async def film(self, request: schemas.FilmRequest) -> bytes:
        """Draw the path and back as a GIF."""
        served = self.find(request.model)
        targets = _targets(served, [request.target])
        return await self._draw_one(answers.film, served, request, targets, FILM_FRAMES)

    async def files(
        self,
        served: ServedModel,
        files: Sequence[bytes],
        targets: Sequence[int | str] | str | None,
        confidence: float | None,
    ) -> bytes:
        """Explain image files; return a zip of files."""
        placeholder = _placeholder(served, len(files))
        question = Question(placeholder, _targets(served, targets), confidence)
        self._check_cost(served, question)
        limit = self.settings.file_pixels
        photographs = await self._decode(read_images, files, served.model, limit)
        pixels = to_pixels(torch.stack([photograph.image for photograph in photographs]))
        e = await self._ask(served, dataclasses.replace(question, pixels=pixels))
        remarks = tuple(photographs[index].notes for index in e.indices.tolist())
        return await self.draw(answers.archive, dataclasses.replace(e, remarks=remarks))

    async def draw(self, work: Callable[..., Result], *given: Any) -> Result:  # noqa: ANN401
        """Draw pictures or write JSON in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._drawing, work, *given)

    async def _draw_one(
        self,
        work: Callable[[Explanation], bytes],
        served: ServedModel,
        request: schemas.SheetRequest | schemas.FilmRequest,
        targets: Any,  # noqa: ANN401
        path: int | None = None,
    ) -> bytes:
        pixels = await self._pixels(served, [request.image])
        correct = request.confidence is not None
        question = Question(pixels, targets, request.confidence, correct, path)
        return await self.draw(work, await self._ask(served, question))

    async def _ask(self, served: ServedModel, question: Question) -> Explanation:
        """Explain, in a batch with other requests."""
        self._check_cost(served, question)
        e = await self.explanations.submit((served, question))
        return dataclasses.replace(e, model=served.name)

    async def _pixels(self, served: ServedModel, images: Sequence[schemas.GivenImage]) -> Images:
        """Decode the images of a request for a model."""
        files = [image.png for image in images if isinstance(image, schemas.ImageFile)]

        def decode() -> list[Tensor]:
            data = [decode_base64(file) for file in files]
            photographs = read_images(data, served.model, self.settings.file_pixels)
            return [photograph.image for photograph in photographs]

        decoded = iter(await self._decode(decode) if files else [])

        def read(image: schemas.GivenImage) -> Tensor:
            if isinstance(image, schemas.Sample):
                return self.sample(served, image.sample)
            if isinstance(image, schemas.ImageFile):
                return next(decoded)
            return read_pixels(image.pixels, served.model.image_shape)

        def read_all() -> Images:
            return to_pixels(torch.stack([read(image) for image in images]))

        if any(isinstance(image, schemas.PixelValues) for image in images):
            return await asyncio.to_thread(read_all)
        return read_all()

    async def _decode(self, work: Callable[..., Result], *given: Any) -> Result:  # noqa: ANN401
        """Decode image files in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._decoding, work, *given)

    def _predict(
        self, requests: Sequence[tuple[ServedModel, Images]], wanted: Wanted
    ) -> Sequence[Prediction | InputError]:
        served = requests[0][0]
        network = SplitNetwork(served.model, self._part(served), wanted=wanted)
        return predict_jointly(served.model, network, [pixels for _, pixels in requests])

    def _explain(
        self, requests: Sequence[tuple[ServedModel, Question]], wanted: Wanted
    ) -> Sequence[Explanation | InputError]:
        served = requests[0][0]
        network = SplitNetwork(served.model, self._part(served), self._network, wanted)
        return explain_jointly(served.model, network, [question for _, question in requests])

    def _part(self, served: ServedModel) -> int:
        return max(self.settings.part_images, self.settings.part_values // served.values)

    def _bounds(self, workers: int) -> Bounds:
        s = self.settings
        return Bounds(s.queued, s.pass_values, s.join_seconds, workers)

    def _cost(self, served: ServedModel, question: Question) -> int:
        return served.values * question.images(len(served.model.class_names))

    def _check_cost(self, served: ServedModel, question: Question) -> None:
        limit, cost = self.settings.answer_values, self._cost(served, question)
        if cost > limit:
            raise TooLargeError(
                f"the answer would have {cost / limit:.1f} times the allowed number of images: "
                "ask for fewer images, targets or frames"
            )


def _placeholder(served: ServedModel, images: int) -> Images:
    """Return images that take no memory, to compute the cost before decoding."""
    return torch.zeros(()).expand(images, *served.model.image_shape)


def _targets(served: ServedModel, targets: Sequence[int | str] | str | None) -> Any:  # noqa: ANN401
    """Return class numbers, each once; "all" and None stay."""
    if targets is None or isinstance(targets, str):
        return targets
    return tuple(dict.fromkeys(served.model.targets(targets)))
