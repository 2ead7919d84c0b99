"""Addresses of the API; `service` does the work."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, File, Form, Request, Security, UploadFile
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from ecinn.drawing.pictures import image_array, png_bytes, to_image
from ecinn.web import schemas
from ecinn.web.metrics import Metrics
from ecinn.web.service import Service
from ecinn.web.settings import MAX_IMAGES
from ecinn.web.uploads import TooLargeError

Answers = dict[int | str, dict[str, Any]]
_LINES = {
    400: "The request cannot be read.",
    401: "The token is missing or wrong.",
    403: "A page of another site sent the request.",
    404: "The model or sample does not exist.",
    408: "The request took too long to arrive.",
    413: "The request is too large.",
    415: "The format is not accepted.",
    422: "A value is not valid.",
    429: "Too many requests are waiting; try again after the given time.",
    502: "The classifier that the model explains fails.",
    503: "There was no answer in time.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}


def _errors(*statuses: int) -> Answers:
    return {
        status: {"model": schemas.ErrorAnswer, "description": _LINES[status]}
        | ({"headers": _RETRY} if status == 429 else {})
        for status in (400, 401, *statuses)
    }


def _file(kind: str, description: str, errors: Answers, form: str = "binary") -> dict[str, Any]:
    """Document an answer that is not JSON."""
    schema = {"type": "string", "format": form} if form else {"type": "string"}
    answer: Answers = {200: {"content": {kind: {"schema": schema}}, "description": description}}
    return {"response_class": Response, "responses": answer | errors}


def _bearer(secured: bool) -> list[Any]:  # noqa: FBT001
    return [Security(HTTPBearer(auto_error=False))] if secured else []


_WORK = _errors(403, 404, 408, 413, 415, 422, 429, 502, 503)


def api(service: Service, *, secured: bool) -> APIRouter:
    """Return version 1 of the API.

    Args:
        secured: document that a token is required; `security` checks it.
    """
    router = APIRouter(prefix="/api/v1", tags=["explanations"], dependencies=_bearer(secured))

    @router.get("/models", responses=_errors(), response_model=schemas.ModelsAnswer)
    async def models() -> dict[str, Any]:
        """List the models."""
        return {"models": [served.describe() for served in service.catalogue.values()]}

    @router.get(
        "/models/{name}/samples/{index}",
        **_file("image/png", "The image; the header X-Label is its class.", _errors(404, 422)),
    )
    async def sample(
        name: Annotated[str, PathParameter(max_length=100, examples=["mnist"])],
        index: Annotated[int, PathParameter(ge=0, le=10_000_000, examples=[18])],
    ) -> Response:
        """Return a test image of a model."""
        served = service.find(name)
        png = png_bytes(to_image(image_array(service.sample(served, index))))
        assert served.samples is not None
        if served.generated:
            return Response(png, media_type="image/png")
        label = served.samples.class_names[int(served.samples.labels[index])]
        ascii_label = label.encode("ascii", "replace").decode()
        return Response(png, media_type="image/png", headers={"X-Label": ascii_label})

    @router.post("/predict", responses=_WORK, response_model=schemas.PredictAnswer)
    async def predict(request: schemas.PredictRequest) -> Response:
        """Predict the classes of images; fast enough to call while a digit is drawn."""
        return Response(await service.predict(request), media_type="application/json")

    @router.post("/explain", responses=_WORK, response_model=schemas.ExplainAnswer)
    async def explain(request: schemas.ExplainRequest) -> Response:
        """Return tipping points, convincing counterfactuals, heatmaps, paths and certificates."""
        return Response(await service.explain(request), media_type="application/json")

    @router.post(
        "/explain/files",
        dependencies=[Depends(_known_fields)],
        **_file("application/zip", "The files of every image.", _WORK),
    )
    async def explain_files(
        files: Annotated[list[UploadFile], File(description="Image files.")],
        model: Annotated[str, Form(max_length=100, examples=["mnist"])],
        targets: Annotated[
            list[Annotated[str, Field(max_length=4000)]] | None,
            Form(max_length=50, description="all, or classes separated by commas; repeatable."),
        ] = None,
        confidence: Annotated[schemas.Confidence, Form()] = None,
        correct: Annotated[
            Literal["true", "false"],
            Form(description="Correct α and α₀ until the stored images are as requested."),
        ] = "false",
    ) -> Response:
        """Explain image files; return sheets, counterfactuals, heatmaps and JSON as a zip."""
        chosen = _targets(targets or [], service.find(model).model.class_names)
        if not 1 <= len(files) <= MAX_IMAGES:
            raise TooLargeError(f"give 1 to {MAX_IMAGES} images at once")
        uploads = [(_file_name(file.filename), await file.read()) for file in files]
        return Response(
            await service.files(model, uploads, chosen, confidence, correct=correct == "true"),
            media_type="application/zip",
            headers={"Content-Disposition": 'attachment; filename="explanations.zip"'},
        )

    @router.post("/film", **_file("image/gif", "The film.", _WORK))
    async def film(request: schemas.FilmRequest) -> Response:
        """Return the path from an image to its counterfactual as a film."""
        return Response(await service.film(request), media_type="image/gif")

    @router.post("/sheet", **_file("image/png", "The sheet.", _WORK))
    async def sheet(request: schemas.SheetRequest) -> Response:
        """Return an explanation as one picture."""
        return Response(await service.sheet(request), media_type="image/png")

    return router


def operations(service: Service, metrics: Metrics, *, secured: bool) -> APIRouter:
    """Return the addresses for monitoring."""
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=schemas.HealthAnswer, responses={})
    async def health() -> dict[str, Any]:
        """Report that the service works, and the length of its queue."""
        return {"status": "ok", "models": list(service.catalogue), "queue": service.waiting}

    @router.get(
        "/metrics",
        dependencies=_bearer(secured),
        **_file("text/plain", "The metrics.", _errors(), form=""),
    )
    async def prometheus() -> Response:
        """Return metrics in the format of Prometheus."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


_FILES_FIELDS = ("files", "model", "targets", "confidence", "correct")
_REPEATABLE = ("files", "targets")


async def _known_fields(request: Request) -> None:
    """Refuse fields of a form that would be ignored."""
    form = await request.form()
    for name in form:
        line = ""
        if name == "path":
            line = "leave out path: the zip has none; /api/v1/explain and /api/v1/film have"
        elif name not in _FILES_FIELDS:
            line = f"leave out {name[:40]}"
        elif name not in _REPEATABLE and len(form.getlist(name)) > 1:
            line = f"give {name} only once"
        if line:
            error = {"type": schemas.EXTRA, "loc": ("body",), "msg": line}
            raise RequestValidationError([error])


def _targets(given: Sequence[str], names: tuple[str, ...]) -> list[int | str] | str | None:
    """Read a form's targets: "all", or names or numbers of classes separated by commas."""
    text = ",".join(filter(None, given))
    if text in ("", "all"):
        return text or None
    return [
        int(target) if target not in names and target.isdecimal() and len(target) < 4 else target
        for target in map(str.strip, text.split(","))
    ]


def _file_name(given: str | None) -> str:
    r"""Return the name without folders, also those of Windows."""
    return re.split(r"[/\\]", given or "")[-1][:255] or "image"
