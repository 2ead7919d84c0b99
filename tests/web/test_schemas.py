"""The API against its OpenAPI document, with generated requests."""

import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ecinn.web.app import create_app
from ecinn.web.catalogue import Catalogue
from helpers.server import FAST, running

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def document(catalogue: Catalogue) -> dict:
    return create_app(catalogue).openapi()


def test_the_document_is_complete(document: dict) -> None:
    assert set(document["paths"]) == {
        "/api/v1/models",
        "/api/v1/models/{name}/samples/{index}",
        "/api/v1/predict",
        "/api/v1/explain",
        "/api/v1/explain/files",
        "/api/v1/film",
        "/api/v1/sheet",
        "/health",
        "/metrics",
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["description"]
            if path.startswith("/api"):
                assert "401" in operation["responses"]
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description") or name.startswith("Body"), name
        if name.endswith("Request"):
            assert schema["examples"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.slow
def test_the_examples_of_the_document_work(catalogue: Catalogue, document: dict) -> None:
    schemas = document["components"]["schemas"]
    with running(catalogue) as address:
        for path, methods in document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            for example in schemas.get(reference.rpartition("/")[2], {}).get("examples", []):
                assert httpx.post(address + path, json=example, timeout=30).status_code == 200
        page = httpx.get(f"{address}/docs").text
        assert "/api/v1/explain" in page
        assert not re.search(r"(src|href)=['\"]?https?:", page)


# Other threads may draw from `random` while an example is generated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
def test_generated_requests_break_nothing(catalogue: Catalogue) -> None:
    with running(catalogue, FAST) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        checked = 0
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(
                max_examples=12,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @_given(operation)
            def one(case: schemathesis.Case) -> None:
                nonlocal checked
                checked += 1
                response = case.call(timeout=30)
                case.validate_response(response, checks=list(CHECKS))

            one()
        assert checked >= 60


def _given(operation):
    negative = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    return given(case=strategies.one_of(operation.as_strategy(), negative))
