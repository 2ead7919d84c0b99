"""The addresses of the API and what they answer; everything is done in `service`."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Security, UploadFile
from fastapi import Path as PathParameter
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from jaxtyping import UInt8
from prometheus_client import CONTENT_TYPE_LATEST
from torch import Tensor

from ecinn.drawing.pictures import image_array, png_bytes, to_image
from ecinn.errors import InputError
from ecinn.web import schemas
from ecinn.web.metrics import Metrics
from ecinn.web.service import Service
from ecinn.web.settings import MOST_IMAGES
from ecinn.web.uploads import TooLargeError

Answers = dict[int | str, dict[str, Any]]
_LINES = {
    400: "The request cannot be read.",
    401: "The token is missing or wrong.",
    403: "A browser sent it from another site's page.",
    404: "There is no such model or sample.",
    408: "The request took too long to arrive.",
    413: "The request asks for too much.",
    415: "It is not a kind of file that is read.",
    422: "Something in it is not as it must be.",
    429: "Too many are waiting; try again after so many seconds.",
    503: "There is no answer in time.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}


def _errors(*statuses: int) -> Answers:
    every: Answers = {
        status: {"model": schemas.ErrorAnswer, "description": _LINES[status]}
        for status in (400, 401, *statuses)
    }
    if 429 in every:
        every[429] = every[429] | {"headers": _RETRY}
    return every


def _binary(kind: str, what: str) -> Answers:
    return _content(kind, what, {"type": "string", "format": "binary"})


def _content(kind: str, what: str, schema: dict[str, str]) -> Answers:
    return {200: {"content": {kind: {"schema": schema}}, "description": what}}


def _bearer(secured: bool) -> list[Any]:  # noqa: FBT001
    return [Security(HTTPBearer(auto_error=False))] if secured else []


_WORK = _errors(403, 404, 408, 413, 415, 422, 429, 503)


def api(service: Service, *, secured: bool) -> APIRouter:
    """Version 1.

    Args:
        secured: a token is asked for, which the document says; `security` is where it is checked.
    """
    router = APIRouter(prefix="/api/v1", tags=["explanations"], dependencies=_bearer(secured))

    @router.get("/models", responses=_errors(), response_model=schemas.ModelsAnswer)
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"models": [_about(service, name) for name in service.catalogue]}

    @router.get(
        "/models/{name}/samples/{index}",
        response_class=Response,
        responses=_binary("image/png", "In its own size; X-Label is its class.")
        | _errors(404, 422),
    )
    async def sample(
        name: Annotated[str, PathParameter(max_length=100, examples=["mnist"])],
        index: Annotated[int, PathParameter(ge=0, le=10_000_000, examples=[18])],
    ) -> Response:
        """A test image of a model."""
        served = service.find(name)
        image = service.sample(served, index)
        assert served.samples is not None
        label = served.samples.class_names[int(served.samples.labels[index])]
        ascii_label = label.encode("ascii", "replace").decode()
        return Response(_png(image), media_type="image/png", headers={"X-Label": ascii_label})

    @router.post("/predict", responses=_WORK, response_model=schemas.PredictAnswer)
    async def predict(request: schemas.PredictRequest) -> Response:
        """What the classifier says of pictures; quick, for while somebody draws."""
        return _json(await service.predict(request))

    @router.post("/explain", responses=_WORK, response_model=schemas.ExplainAnswer)
    async def explain(request: schemas.ExplainRequest) -> Response:
        """Tipping points, convincing counterfactuals, heatmaps, paths; what is known of them."""
        answer = await service.explain(request)
        return await service.draw(_json, answer)

    @router.post(
        "/explain/files",
        response_class=Response,
        responses=_binary("application/zip", "Of every picture its files.") | _WORK,
    )
    async def explain_files(
        files: Annotated[list[UploadFile], File(description="Pictures.")],
        model: Annotated[str, Form(max_length=100, examples=["mnist"])],
        targets: Annotated[
            str | None,
            Form(max_length=4000, description="all, or class numbers with commas between them."),
        ] = None,
        confidence: Annotated[float | None, Form(gt=0, lt=1, allow_inf_nan=False)] = None,
    ) -> Response:
        """Picture files in; sheets, counterfactuals, heatmaps and certificates out, as a zip."""
        served = service.find(model)
        if not 1 <= len(files) <= MOST_IMAGES:
            raise TooLargeError(f"give 1 to {MOST_IMAGES} pictures at once")
        data = [await file.read() for file in files]
        zipped = await service.files(served, data, _targets(targets), confidence)
        return Response(
            zipped,
            media_type="application/zip",
            headers={"Content-Disposition": 'attachment; filename="explanations.zip"'},
        )

    @router.post(
        "/film",
        response_class=Response,
        responses=_binary("image/gif", "The path there and back.") | _WORK,
    )
    async def film(request: schemas.FilmRequest) -> Response:
        """The path from a picture to its counterfactual as a film."""
        return Response(await service.film(request), media_type="image/gif")

    @router.post(
        "/sheet",
        response_class=Response,
        responses=_binary("image/png", "The sheet.") | _WORK,
    )
    async def sheet(request: schemas.SheetRequest) -> Response:
        """An explanation on one sheet."""
        return Response(await service.sheet(request), media_type="image/png")

    return router


def operations(service: Service, metrics: Metrics, *, secured: bool) -> APIRouter:
    """For those who run it."""
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=schemas.HealthAnswer, responses={})
    async def health() -> dict[str, Any]:
        """Whether it works, and how many wait."""
        return {"status": "ok", "models": list(service.catalogue), "queue": service.waiting}

    @router.get(
        "/metrics",
        response_class=Response,
        dependencies=_bearer(secured),
        responses=_content("text/plain", "Counters.", {"type": "string"}) | _errors(),
    )
    async def prometheus() -> Response:
        """Counters in the format of Prometheus."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _about(service: Service, name: str) -> dict[str, Any]:
    served = service.catalogue[name]
    channels, height, width = served.model.classifier.image_shape
    return {
        "name": name,
        "title": served.title,
        "kind": served.kind,
        "classes": list(served.model.class_names),
        "channels": channels,
        "height": height,
        "width": width,
        "samples": 0 if served.samples is None else len(served.samples),
    }


def _targets(given: str | None) -> list[int] | str | None:
    if given is None or given in ("", "all"):
        return given or None
    numbers = [number.strip() for number in given.split(",")]
    if not all(number.isascii() and number.isdigit() and len(number) <= 3 for number in numbers):
        raise InputError("targets: say all, or class numbers with commas between them")
    return [int(number) for number in numbers]


def _json(answer: dict[str, Any]) -> Response:
    """Written without being checked again: answers are many and large."""
    content = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(content.encode(), media_type="application/json")


def _png(image: UInt8[Tensor, "channels height width"]) -> bytes:
    return png_bytes(to_image(image_array(image)))
