"""Requests and answers of the API with examples, from which the OpenAPI document is made."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from ecinn.web.settings import MAX_ALPHA, MAX_FRAMES, MAX_IMAGES, MAX_ROWS

ClassNumber = Annotated[int, Field(ge=0, le=999, strict=True)]
ClassName = Annotated[str, Field(min_length=1, max_length=100)]
Probability = Annotated[float, Field(ge=0, le=1 + 1e-5)]
Posterior = Annotated[dict[str, Probability], Field(description="p(y) by class name.")]
Answer = Annotated[
    Posterior | None,
    Field(description="p(y) by the classifier that the model explains, if there is one."),
]
Png = Annotated[str, Field(pattern="^data:image/png;base64,", description="A data URL.")]
Confidence = Annotated[
    Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | Literal["alpha_1"] | None,
    Field(
        description="Posterior of the target at the convincing image; alpha_1 for the paper's α₁; "
        "null for the model's default."
    ),
]
Alpha = Annotated[float, Field(ge=-MAX_ALPHA, le=MAX_ALPHA, allow_inf_nan=False)]
Target = Annotated[ClassNumber | ClassName, Field(description="A class by its number or name.")]
Targets = Annotated[
    Literal["all"] | Annotated[list[Target], Field(min_length=1, max_length=1000)] | None,
    Field(description="Classes, all others, or null for the second most likely class."),
]
Path = Annotated[
    Annotated[int, Field(ge=0, le=MAX_FRAMES, strict=True)]
    | Annotated[list[Alpha], Field(min_length=1, max_length=MAX_FRAMES + 2)]
    | None,
    Field(
        description="Also return the path: a number of α from 0 to 1.3·α, besides α₀ and α, or "
        "a list of α."
    ),
]
ModelName = Annotated[
    str, Field(min_length=1, max_length=100, description="One of /api/v1/models.")
]


EXTRA: Final = "extra"
"""Type of the error about an unknown key."""


def _examples(*examples: JsonDict) -> ConfigDict:
    return ConfigDict(extra="forbid", json_schema_extra={"examples": list(examples)})


class Strict(BaseModel):
    """Refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown_keys(cls, given: Any) -> Any:  # noqa: ANN401
        """Raise one error however many keys are unknown: pydantic would make one of each."""
        if isinstance(given, Mapping):
            for key in given:
                if key not in cls.__pydantic_fields__:
                    raise PydanticCustomError(EXTRA, "leave out {name}", {"name": str(key)[:40]})
        return given


class ImageFile(Strict):
    """An image file of any size."""

    png: str = Field(min_length=1, description="Base64 of a PNG, JPEG, WebP or BMP file.")


class Sample(Strict):
    """A test image of the model."""

    sample: int = Field(ge=0, le=10_000_000, strict=True)


_VALUE: JsonDict = {"type": "integer", "minimum": 0, "maximum": 255}
_COLOUR: JsonDict = {"type": "array", "items": _VALUE, "minItems": 3, "maxItems": 3}
_ROW: JsonDict = {"type": "array", "items": {"anyOf": [_VALUE, _COLOUR]}, "maxItems": MAX_ROWS}


class PixelValues(Strict):
    """Rows of grey values, or of red, green and blue, at the model's image size."""

    # Checked by `uploads.read_pixels`: pydantic would make an error of every value.
    pixels: list[Any] = Field(min_length=1, max_length=MAX_ROWS, json_schema_extra={"items": _ROW})


GivenImage = ImageFile | Sample | PixelValues
Images = Annotated[list[GivenImage], Field(min_length=1, max_length=MAX_IMAGES)]


class PredictRequest(Strict):
    """Images to predict."""

    model_config = _examples({"model": "mnist", "images": [{"sample": 18}]})
    model: ModelName
    images: Images


class ExplainRequest(Strict):
    """Images to explain."""

    model_config = _examples(
        {"model": "mnist", "images": [{"sample": 18}], "targets": ["8"], "path": 5},
        {"model": "mnist", "images": [{"sample": 18}], "targets": None, "confidence": 0.9},
        {"model": "mnist", "images": [{"sample": 18}], "confidence": "alpha_1"},
    )
    model: ModelName
    images: Images
    targets: Targets = None
    confidence: Confidence = None
    correct: bool = Field(
        default=False,
        description="Correct α until the stored image is as requested, and α₀ until the stored "
        "tipping point is a tie.",
    )
    path: Path = None


class FilmRequest(Strict):
    """An image and the target of its path."""

    model_config = _examples({"model": "mnist", "image": {"sample": 18}, "target": "8"})
    model: ModelName
    image: GivenImage
    target: Target
    confidence: Confidence = None


class SheetRequest(Strict):
    """An image and the targets of its explanation."""

    model_config = _examples({"model": "mnist", "image": {"sample": 18}, "targets": "all"})
    model: ModelName
    image: GivenImage
    targets: Targets = "all"
    confidence: Confidence = None


FIELDS: Mapping[str, str] = {
    "body": 'a JSON object such as {"model": "mnist", "images": [{"sample": 18}]}',
    "model": "the name of one of /api/v1/models",
    "images": f'a list of 1 to {MAX_IMAGES} images such as [{{"sample": 18}}]',
    "image": 'an image is {"png": base64 of a file}, {"sample": number} or '
    '{"pixels": rows of values from 0 to 255}',
    "png": "base64 of a PNG, JPEG, WebP or BMP file",
    "sample": "the number of a test image, from 0",
    "pixels": f"1 to {MAX_ROWS} rows of values from 0 to 255, at the model's own size",
    "targets": "a list of class numbers or names such as [8, 9], or 'all'",
    "target": "a class number or name such as 8",
    "confidence": "a number above 0 and below 1 (0.9 is 90 %), or 'alpha_1'",
    "correct": "true or false",
    "path": f"a number of frames from 0 to {MAX_FRAMES}, or a list of 1 to {MAX_FRAMES + 2} α "
    f"from {-MAX_ALPHA:g} to {MAX_ALPHA:g} such as [0, 0.5, 1]",
    "files": f"1 to {MAX_IMAGES} image files",
    "name": "the name of one of /api/v1/models",
    "index": "the number of a test image, from 0",
}
"""A sentence for every field of a request, shown instead of pydantic's error message."""


def in_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line which field is wrong, and what to send instead."""
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]] or ["body"]
    if first["type"] == EXTRA and place == ["body"]:
        return f"body: {first['msg']}"
    name, where = place[0], place[0] + " is missing" * (first["type"] == "missing")
    if name in ("images", "image") and len(place) > 1:
        depth = 2 if name == "image" else 3
        where, start = ".".join(place[: depth - 1]), first["loc"][:depth]
        # Every kind of image has an error; that of the kind that was meant is about its value.
        meant = {
            error["loc"][-1]
            for error in errors
            if error["loc"][:depth] == start and error["type"] not in ("missing", EXTRA)
        }
        name = next(iter(meant & {"png", "sample", "pixels"}), "image")
        where += "" if name == "image" else f".{name}"
    return f"{where}: {FIELDS.get(name, first['msg'])}"


class ErrorAnswer(BaseModel):
    """An error and what to do about it, in one line."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"error": "too many requests: try again in 2 s"}]}
    )
    error: str


class ModelAnswer(BaseModel):
    """A model of the service."""

    name: str = Field(examples=["mnist"])
    title: str = Field(examples=["Digits"])
    kind: Literal["digits", "dots", "faces", "images"]
    classes: list[str] = Field(description="Class names, by class number.")
    channels: int
    height: int
    width: int
    samples: int = Field(description="Number of test images.")
    default_confidence: float | Literal["alpha_1"] = Field(
        description="The confidence of a request that gives none."
    )
    classifier: str | None = Field(
        description="The classifier that a distilled model explains: p and verdicts are about its "
        "answers, not about the model's own."
    )
    fine_tuned: bool = Field(
        description="True if it was trained further so that other networks, too, read its "
        "counterfactuals as the target."
    )
    generated: bool = Field(
        description="True if the test images are samples of a model, because there are no others."
    )


class ModelsAnswer(BaseModel):
    """All models of the service."""

    models: list[ModelAnswer]


class Prediction(BaseModel):
    """The prediction of an image."""

    predicted: str = Field(examples=["3"])
    posterior: Posterior
    answer: Answer = None
    log_p: float = Field(description="log p(x), pixels in [0, 1].")
    typical: bool | None = Field(description="False for out-of-distribution images.")
    out_of_distribution: list[str] = Field(examples=[["texture"]])
    caution: str | None = Field(description="A sentence about an out-of-distribution image.")


class PredictAnswer(BaseModel):
    """A prediction for every image."""

    model: str
    images: list[Prediction]


class PathAnswer(BaseModel):
    """The path from the image to the counterfactual and beyond."""

    alphas: list[float]
    posterior: dict[str, list[Probability]] = Field(
        description="p(y) of the stored 8-bit images along the path, by class name. These are the "
        "model's own, also if it explains a classifier."
    )
    images: list[Png]
    heatmaps: list[Png]


class Counterfactual(BaseModel):
    """A counterfactual image and its certificate."""

    posterior: Posterior
    stored_posterior: Posterior | None = Field(description="p(y) of the 8-bit image.")
    answer: Answer = None
    winner: str = Field(description="The predicted class.")
    reached: bool = Field(description="True if the target is the predicted class.")
    clamped: float = Field(description="Share of pixels clamped to [0, 1] for storing.")
    image: Png


class Heatmap(BaseModel):
    """The change of the convincing image: white is zero, red is lighter, blue is darker."""

    full_colour: float = Field(description="Change of a pixel in [0, 1] drawn in full colour.")
    image: Png
    overlay: Png = Field(description="The heatmap over the input.")


class TargetAnswer(BaseModel):
    """The explanation of an image against one target."""

    target: str
    alpha_0: float = Field(
        description="α at which the two classes are equally likely before rounding to 8 bits, or "
        "the corrected one; `tipping_point.stored_posterior` is about the picture."
    )
    alpha_1: float = Field(description="The paper's convincing α, 4/5 + α₀/2.")
    alpha: float = Field(
        description="α of the convincing image: α₁, or that of the requested confidence, or the "
        "corrected one."
    )
    reachable: bool = Field(description="True if the requested confidence exists on the path.")
    highest: float | None = Field(description="The highest confidence, if it is not reachable.")
    as_requested: bool = Field(description="True if the stored image fulfils the request.")
    explained: bool | None = Field(
        default=None,
        description="False if the classifier never answers as requested: then this is the best "
        "that was found. Given if a classifier is explained.",
    )
    tied: bool | None = Field(
        default=None,
        description="True if the classifier is undecided between the two classes at the tipping "
        "point.",
    )
    bent: bool | None = Field(
        default=None,
        description="True if the direction is bent away from what the classifier saw instead.",
    )
    queries: int | None = Field(
        default=None,
        description="Pictures that the classifier was asked about, besides the input.",
    )
    corrections: int = Field(description="Number of corrections of α and α₀.")
    passes: int = Field(description="Calls of the network, with corrections.")
    third_class: str | None = Field(
        description="The class that wins at the tipping point if it is neither of the two."
    )
    tipping_point: Counterfactual
    convincing: Counterfactual
    heatmap: Heatmap
    sentences: list[str] = Field(examples=[["The stored image is classified as an 8 (99.7 %)."]])
    path: PathAnswer | None


class ImageAnswer(Prediction):
    """The explanation of an image."""

    index: int = Field(description="Its position in the request.")
    source: str | None
    notes: list[str]
    round_trip_error: float = Field(description="Largest |x − f⁻¹(f(x))| of a pixel.")
    image: Png = Field(description="The input as the model sees it.")
    targets: list[TargetAnswer]


class Failure(BaseModel):
    """An image that was not explained, such as one already predicted as a target."""

    index: int = Field(description="Its position in the request.")
    source: str | None
    reason: str


class AskedClassifier(BaseModel):
    """The classifier that a distilled model explains."""

    name: str = Field(examples=["scanner.onnx"])
    queries: int = Field(description="Pictures that it was asked about for this answer.")
    counterfactuals: int
    not_explained: int = Field(description="Those that it never read as requested.")


class ExplainAnswer(BaseModel):
    """`Explanation.to_dict()` of the Python library, with pictures and sentences."""

    version: Literal[1]
    model: str
    classifier: AskedClassifier | None = None
    confidence: float | Literal["alpha_1"]
    requested: str = Field(
        description="The confidence in words.", examples=["99 % requested (this model's default)"]
    )
    passes: int = Field(description="Calls of the network on the batch, without corrections.")
    images: list[ImageAnswer]
    failures: list[Failure]


class HealthAnswer(BaseModel):
    """State of the service."""

    status: Literal["ok"]
    models: list[str]
    queue: int = Field(description="Requests that wait for the network.")
