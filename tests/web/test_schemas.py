"""The API against its OpenAPI document, with generated requests."""

import re
from typing import get_args

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from pydantic import BaseModel, ValidationError
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ecinn.web.app import create_app
from ecinn.web.catalogue import Catalogue
from ecinn.web.schemas import (
    FIELDS,
    ExplainRequest,
    FilmRequest,
    GivenImage,
    PredictRequest,
    SheetRequest,
    in_words,
)
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


_ONE = {"model": "mnist", "images": [{"sample": 18}]}
_SENTENCES = [
    *(
        (ExplainRequest, _ONE | {"targets": targets}, "targets", "targets")
        for targets in ("8", "8,9", [-1], [8.0], [], [True], [[8], [9]], {}, 8)
    ),
    *(
        (ExplainRequest, _ONE | {"confidence": value}, "confidence", "confidence")
        for value in (90, 0, 1, "alpha", [], True)
    ),
    *((ExplainRequest, _ONE | {"path": path}, "path", "path") for path in (62, 1.5, [9], [], "x")),
    (ExplainRequest, _ONE | {"correct": "perhaps"}, "correct", "correct"),
    (ExplainRequest, _ONE | {"model": 3}, "model", "model"),
    (ExplainRequest, [], "body", "body"),
    (ExplainRequest, {"model": "mnist"}, "images is missing", "images"),
    (ExplainRequest, _ONE | {"images": []}, "images", "images"),
    (ExplainRequest, _ONE | {"images": [{"sample": 1}, 5]}, "images.1", "image"),
    (PredictRequest, _ONE | {"images": [{}]}, "images.0", "image"),
    (PredictRequest, _ONE | {"images": [{"sample": 1, "png": "a"}]}, "images.0", "image"),
    (PredictRequest, _ONE | {"images": [{"sample": -1}]}, "images.0.sample", "sample"),
    (PredictRequest, _ONE | {"images": [{"png": ""}]}, "images.0.png", "png"),
    (PredictRequest, _ONE | {"images": [{"pixels": 3}]}, "images.0.pixels", "pixels"),
    (FilmRequest, {"model": "mnist", "image": {"sample": 1}}, "target is missing", "target"),
    (
        FilmRequest,
        {"model": "mnist", "image": {"sample": "x"}, "target": 8},
        *2 * ("image.sample",),
    ),
    (SheetRequest, {"model": "mnist", "image": 8}, "image", "image"),
]


@pytest.mark.parametrize(("request_type", "body", "where", "field"), _SENTENCES)
def test_errors_say_what_to_send(
    request_type: type[BaseModel], body: object, where: str, field: str
) -> None:
    with pytest.raises(ValidationError) as invalid:
        request_type.model_validate(body)
    errors = [error | {"loc": ("body", *error["loc"])} for error in invalid.value.errors()]
    assert in_words(errors) == f"{where}: {FIELDS[field.rpartition('.')[2]]}"


def test_every_field_has_a_sentence(document: dict) -> None:
    kinds = {kind.__name__ for kind in get_args(GivenImage)}
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") or name.startswith("Body") or name in kinds:
            assert set(schema["properties"]) <= set(FIELDS), name
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {each["name"] for each in operation.get("parameters", [])} <= set(FIELDS)


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
