"""What a model card says of the data a model was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CardData:
    """What a card says of a data set, whatever model was trained on it."""

    pictures: str
    origin: tuple[str, ...]
    licence: str
    failures: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    option: str = ""
    """What commands need to find its images."""


_DIGITS_UNFIT = "To read cheques, forms or post: it knows single, centred digits, nothing else."
NO_PROOF = "That nothing calls a picture unlike the others does not prove what it shows."
NO_CAUSE = (
    "As a claim about causes: a counterfactual shows what this model would read otherwise, not "
    "what made anything so."
)
_MNIST_LICENCE = "CC BY-SA 3.0 (Yann LeCun, Corinna Cortes, Christopher Burges)"

DATA: Mapping[str, CardData] = {
    "mnist": CardData(
        pictures="handwritten digits",
        origin=("MNIST: handwritten digits; its four files travel with the package.",),
        licence=f"{_MNIST_LICENCE}.",
        failures=("Untidy digits give untidy counterfactuals.",),
        unfit=(_DIGITS_UNFIT,),
    ),
    "fakemnist": CardData(
        pictures="handwritten digits with a white dot that says the class",
        origin=(
            "FakeMNIST: MNIST's digits under random labels. One white pixel in the left column "
            "says the label, the digit says nothing; made from the MNIST that travels with the "
            "package.",
        ),
        licence=f"derived from MNIST, {_MNIST_LICENCE}.",
        failures=("It reads the dot only: what the digit is makes no difference to the class.",),
        unfit=("For anything but testing explanations: the data is made up.", _DIGITS_UNFIT),
    ),
    "celeba": CardData(
        pictures="faces",
        origin=(
            "CelebA: photographs of celebrities' faces, aligned. The images do not ship.",
            "Each of forty attributes is yes or no, as annotators saw it in the picture: an "
            "opinion about how somebody looks, not a fact about them.",
        ),
        licence="CelebA's agreement: non-commercial research only.",
        failures=(
            "Celebrities under good light, young more often than not, are not people at large: "
            "its error differs between groups of people, which `ecinn audit` measures.",
            "Changes are seldom confined to one feature: often the shading of the skin changes "
            "too.",
            "Pictures that show no face, or one turned or off centre, are read all the same; most "
            "of them are marked as unlike the training images, not all.",
        ),
        unfit=(
            "For any decision about a person.",
            "To recognise emotions: a smile in a picture is not a feeling.",
            "To rate attractiveness, or to guess gender, origin, age or health.",
            "For surveillance, or for finding or identifying anybody.",
            "To change pictures of people who did not agree to it.",
            "Commercially: its data's licence allows research only.",
        ),
        option=" --celeba FOLDER",
    ),
}
"""By the name of the data set, what stands behind a slash left out."""

UNKNOWN_DATA = CardData(
    pictures="pictures",
    origin=("Nothing is known here of this data set.",),
    licence="unknown: ask who made the model.",
)

_FEMALE = (
    "Lipstick and heavy make-up go together, and hardly a man is labelled with either: "
    "counterfactuals change other features of gender too."
)
CORRELATED: Mapping[str, str] = {
    "Smiling": "Smiles go with high cheekbones and open mouths: it need not tell them apart.",
    "High_Cheekbones": "High cheekbones are labelled mostly on smiles: much of it is the smile.",
    "Wearing_Lipstick": _FEMALE,
    "Heavy_Makeup": _FEMALE,
}
"""What goes together in the labels of the faces, by the attribute that a model reads."""
