"""The page's files: read once at the start, so that no request reaches the file system."""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ecinn.web.security import error_answer

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}


@dataclass(frozen=True)
class StaticFile:
    """What a browser gets."""

    content: bytes
    media_type: str
    etag: str


def read_page(folder: Path = FOLDER) -> Mapping[str, StaticFile]:
    """All files of the page by their names; none where there is no page."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _read(path) for path in files}


def static_answer(files: Mapping[str, StaticFile], name: str, request: Request) -> Response:
    """The file, or that the browser has it already; it asks every time."""
    if name not in files:
        return error_answer(
            404, "there is nothing here: the page is at /, the API's words at /docs"
        )
    file = files[name]
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    kind = _TYPES.get(path.suffix, guessed)
    return StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
