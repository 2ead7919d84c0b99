"""What requests and answers look like, with examples: the OpenAPI document is made from these."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from ecinn.web.settings import FURTHEST_ALPHA, MOST_FRAMES, MOST_IMAGES, MOST_ROWS

ClassNumber = Annotated[int, Field(ge=0, le=999, strict=True)]
Probability = Annotated[float, Field(ge=0, le=1 + 1e-5)]
Posterior = Annotated[list[Probability], Field(description="p(y) of every class.")]
Png = Annotated[str, Field(pattern="^data:image/png;base64,", description="A data URL.")]
Confidence = Annotated[
    float | None,
    Field(
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="How sure of the target the convincing picture shall be, instead of at α₁.",
    ),
]
Alpha = Annotated[float, Field(ge=-FURTHEST_ALPHA, le=FURTHEST_ALPHA, allow_inf_nan=False)]
Targets = Annotated[
    Literal["all"] | Annotated[list[ClassNumber], Field(min_length=1, max_length=1000)] | None,
    Field(description="Class numbers, all others, or null for the class that comes second."),
]
ModelName = Annotated[
    str, Field(min_length=1, max_length=100, description="One of /api/v1/models.")
]


class Strict(BaseModel):
    """Nothing but what is said here."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def nothing_else(cls, given: Any) -> Any:  # noqa: ANN401
        """One error however many keys are too many: pydantic would make one of each."""
        if isinstance(given, Mapping):
            for key in given:
                if key not in cls.model_fields:
                    name = str(key)[:40]
                    raise PydanticCustomError("extra", "leave out {name}", {"name": name})
        return given


class PictureFile(Strict):
    """A picture file of any size."""

    png: str = Field(min_length=1, description="Base64 of a PNG, JPEG, WebP or BMP file.")


class Sample(Strict):
    """One of the model's test images."""

    sample: int = Field(ge=0, le=10_000_000, strict=True)


_VALUE: JsonDict = {"type": "integer", "minimum": 0, "maximum": 255}
_COLOUR: JsonDict = {"type": "array", "items": _VALUE, "minItems": 3, "maxItems": 3}
_ROW: JsonDict = {"type": "array", "items": {"anyOf": [_VALUE, _COLOUR]}, "maxItems": MOST_ROWS}


class PixelValues(Strict):
    """Rows of grey values, or of red, green and blue, at the model's own size."""

    # Checked by `uploads.read_pixels` in one go: pydantic would make an error of every value.
    pixels: list[Any] = Field(
        min_length=1, max_length=MOST_ROWS, json_schema_extra={"items": _ROW}
    )


GivenImage = PictureFile | Sample | PixelValues
Images = Annotated[list[GivenImage], Field(min_length=1, max_length=MOST_IMAGES)]


class PredictRequest(Strict):
    """Pictures to read."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"model": "mnist", "images": [{"sample": 18}]}]},
    )
    model: ModelName
    images: Images


class ExplainRequest(Strict):
    """Pictures to explain."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"model": "mnist", "images": [{"sample": 18}], "targets": [8], "frames": 5},
                {"model": "mnist", "images": [{"sample": 18}], "targets": None, "confidence": 0.9},
            ]
        },
    )
    model: ModelName
    images: Images
    targets: Targets = None
    confidence: Confidence = None
    correct: bool = Field(
        default=False, description="Correct what the classifier does not read as was asked."
    )
    frames: int = Field(
        default=0,
        ge=0,
        le=MOST_FRAMES,
        description="Also the path: so many α from 0 to 1.3·α₁, and α₀ and α₁ among them.",
    )
    alphas: Annotated[
        Annotated[list[Alpha], Field(min_length=1, max_length=MOST_FRAMES + 2)] | None,
        Field(description="Also the path: exactly at these α. Leave frames out then."),
    ] = None


class FilmRequest(Strict):
    """A picture and where its path shall lead."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"model": "mnist", "image": {"sample": 18}, "target": 8}]},
    )
    model: ModelName
    image: GivenImage
    target: ClassNumber
    confidence: Confidence = None


class SheetRequest(Strict):
    """A picture and the classes it shall be explained against."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"model": "mnist", "image": {"sample": 18}, "targets": "all"}]
        },
    )
    model: ModelName
    image: GivenImage
    targets: Targets = "all"
    confidence: Confidence = None


class ErrorAnswer(BaseModel):
    """What was wrong and what to do, in one line."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"error": "too many requests: try again in 2 s"}]}
    )
    error: str


class ModelAnswer(BaseModel):
    """A model that is served."""

    name: str = Field(examples=["mnist"])
    title: str = Field(examples=["Digits"])
    kind: Literal["digits", "dots", "faces", "images"]
    classes: list[str] = Field(description="What they are called, by their number.")
    channels: int
    height: int
    width: int
    samples: int = Field(description="Test images that can be asked for.")


class ModelsAnswer(BaseModel):
    """All models that are served."""

    models: list[ModelAnswer]


class Prediction(BaseModel):
    """What the classifier says of a picture."""

    predicted: int = Field(examples=[3])
    posterior: Posterior
    typical: bool = Field(description="Whether it is like nearly all training images.")
    reasons: list[str] = Field(description="Why not, where it is not.")


class PredictAnswer(BaseModel):
    """A prediction for every picture."""

    model: str
    predictions: list[Prediction]


class PathAnswer(BaseModel):
    """The way from the picture to the counterfactual and beyond."""

    alphas: list[float]
    images: list[Png]
    heatmaps: list[Png]
    posteriors: list[Posterior] = Field(description="Of every stored 8-bit picture.")


class TargetAnswer(BaseModel):
    """Why it is not the target."""

    target: int
    alpha_0: float = Field(description="Where the two classes tie.")
    alpha_1: float = Field(
        description="Where the convincing picture is: at the paper's 4/5 + α₀/2, where the "
        "asked confidence is obtained, or where a correction led."
    )
    tipping_point: Png
    convincing: Png
    heatmap: Png = Field(description="Zero white; red where light is added, blue where taken.")
    overlay: Png = Field(description="The heatmap over the input.")
    tipping_posterior: Posterior
    convincing_posterior: Posterior = Field(description="Of the stored 8-bit picture.")
    reached: bool = Field(description="Whether the stored picture is read as the target.")
    third_class: int | None = Field(
        description="The class that wins at the tipping point where neither of the two does."
    )
    words: list[str] = Field(examples=[["The stored picture is read as an 8 with 99.7 %."]])
    path: PathAnswer | None


class ExplanationAnswer(Prediction):
    """Why a picture is what it is."""

    input: Png
    targets: list[TargetAnswer]


class ExplainAnswer(BaseModel):
    """An explanation for every picture."""

    model: str
    explanations: list[ExplanationAnswer]


class HealthAnswer(BaseModel):
    """Whether the service works."""

    status: Literal["ok"]
    models: list[str]
    queue: int = Field(description="Requests that wait for the network.")
