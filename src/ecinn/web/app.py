"""The service as an ASGI application."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ecinn.errors import EcinnError, InputError
from ecinn.web import schemas
from ecinn.web import static as page
from ecinn.web.batching import FullError
from ecinn.web.catalogue import Catalogue
from ecinn.web.metrics import Metrics, Observed
from ecinn.web.routes import api, operations
from ecinn.web.security import Bounded, Guarded, Hardened, error_answer
from ecinn.web.service import Service, UnknownError
from ecinn.web.settings import Settings, check_token
from ecinn.web.uploads import TooLargeError, WrongTypeError

_DESCRIPTION = (
    "Counterfactual explanations of images in two network evaluations: how an image would have to "
    "change for the classifier to predict another class. Errors are one line of JSON: "
    '{"error": "…"}.'
)
_STATUSES: Mapping[type[Exception], int] = {
    InputError: 422,
    UnknownError: 404,
    TooLargeError: 413,
    WrongTypeError: 415,
    EcinnError: 502,  # of the classifier that a student explains; the last, as the others are too
}
_REFUSALS = {413: "too_large", 415: "wrong_type"}


def create_app(
    catalogue: Catalogue,
    settings: Settings | None = None,
    *,
    token: str | None = None,
    page_folder: Path = page.FOLDER,
) -> FastAPI:
    """Create the application that serves these models.

    Args:
        token: the bearer token that the API requires; None for a public API.
        page_folder: the folder of the page's files.
    """
    check_token(token)
    settings = settings or Settings()
    metrics = Metrics()
    service = Service(catalogue, settings, metrics)
    app = FastAPI(
        title="ECINN",
        version="1",
        description=_DESCRIPTION,
        lifespan=lambda _: service.running(),
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.include_router(api(service, secured=token is not None))
    app.include_router(operations(service, metrics, secured=token is not None))
    _add_page(app, page_folder)
    _add_errors(app, metrics)
    app.state.metrics = metrics
    # The last one added is the outermost.
    app.add_middleware(Bounded, settings=settings, metrics=metrics)
    app.add_middleware(Guarded, token=token, metrics=metrics, hosts=settings.hosts)
    app.add_middleware(Hardened)
    app.add_middleware(Observed, metrics=metrics)
    return app


def _add_page(app: FastAPI, folder: Path) -> None:
    files = page.read_page(folder)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return page.static_answer(files, page.INDEX, request)

    @app.api_route("/static/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        return page.static_answer(files, name, request)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page.documentation(app.openapi())


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error with one line and the right status."""

    async def known(_: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
        if status in _REFUSALS:
            metrics.refused.labels(_REFUSALS[status]).inc()
        return error_answer(status, str(error))

    for kind in _STATUSES:
        app.add_exception_handler(kind, known)

    @app.exception_handler(FullError)
    async def full(_: Request, error: FullError) -> Response:
        metrics.refused.labels(error.reason).inc()
        return error_answer(429, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        lines = {404: page.NOT_FOUND, 405: "this address does not take that method: see /docs"}
        line = lines.get(error.status_code, str(error.detail))
        return error_answer(error.status_code, line, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(*_validation(request, error))


def _validation(request: Request, error: RequestValidationError) -> tuple[int, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    form = request.url.path.endswith("/files")
    expected = "multipart/form-data" if form else "application/json"
    if request.method == "POST" and kind != expected:
        return 415, f"send {expected}"
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return 400, "the body is not JSON"
    return 422, schemas.in_words(errors)
