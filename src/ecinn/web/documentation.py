"""The API in words, made from its OpenAPI document; needs no network and no script."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #8886; padding: .5rem 0 }
code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { overflow-x: auto; padding: .7rem; background: #8882; border-radius: 6px }
"""


def documentation(document: Mapping[str, Any]) -> Response:
    """A page with every operation, what it answers, and an example."""
    operations = [
        _operation(method, path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    about = document["info"]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(about['title'])}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(about['title'])}</h1><p>{html.escape(about['description'])}</p>"
        "<p>All of it for machines: <a href=/openapi.json>openapi.json</a>. "
        "<a href=/>The page</a>.</p>" + "".join(operations)
    )
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'"
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def _operation(
    method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]
) -> str:
    answers = ", ".join(
        f"<code>{status}</code> {html.escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    examples = "".join(
        f"<pre>{html.escape(json.dumps(example, ensure_ascii=False))}</pre>"
        for example in _examples(operation, document)
    )
    return (
        f"<section><h2><code>{method.upper()} {html.escape(path)}</code></h2>"
        f"<p>{html.escape(operation.get('description', ''))}</p>{examples}<p>{answers}</p>"
        "</section>"
    )


def _examples(operation: Mapping[str, Any], document: Mapping[str, Any]) -> list[Any]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    schema = document.get("components", {}).get("schemas", {}).get(name, {})
    examples: list[Any] = schema.get("examples", [])
    return examples
