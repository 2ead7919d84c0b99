"""The page's files, read once at the start, and the API's documentation as a page."""

import base64
import hashlib
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ecinn.web.security import error_answer

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
NOT_FOUND = "this address does not exist: the page is at /, the API's documentation at /docs"


def read_page(folder: Path = FOLDER) -> Mapping[str, Response]:
    """Read all files of a folder, by their relative path; none if it does not exist."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _read(path) for path in files}


def _read(path: Path) -> Response:
    content = path.read_bytes()
    # Older Pythons and some systems have another type for scripts.
    kind = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    return Response(content, media_type=kind or "application/octet-stream", headers=headers)


def static_answer(files: Mapping[str, Response], name: str, request: Request) -> Response:
    """Return a file, or 304 if the browser has it already."""
    if name not in files:
        return error_answer(404, NOT_FOUND)
    headers = {key: files[name].headers[key] for key in ("ETag", "Cache-Control")}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return files[name]


def documentation(document: Mapping[str, Any]) -> Response:
    """Return a page with every operation of an OpenAPI document; needs neither CDN nor script."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page = environment.get_template("docs.html").render(document=document)
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'"
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})
