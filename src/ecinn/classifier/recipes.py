"""Training recipes: each model as one frozen dataclass, each value with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset, Split, load_dataset
from ecinn.data.face_crop import CELEBA_CROP, FaceCrop
from ecinn.data.framing import Framing
from ecinn.errors import InputError
from ecinn.flow.network import Architecture, Stage
from ecinn.progress import Observer, ignore


@dataclass(frozen=True)
class FineTuning:
    """Fine-tuning for counterfactuals, by distillation on the path. Not in the paper.

    Each image is changed to a random class, at α₁ or to a random confidence, and rounded to 8
    bits. Weighted terms are added to the loss of the first stage:
    """

    epochs: int
    faithfulness: float
    """Weight of KL(p(y|z + αΔ) ‖ p(y|x̂)): the requested posterior against the stored image's."""
    distillation_weight: float
    """Weight of the cross-entropy between a teacher's and the classifier's posterior of x̂."""
    batch_size: int = 512
    learning_rate: float = 5e-4
    ema_decay: float = 0.998
    proximity: float = 0.0
    """Weight of the mean of |x̂ − x|."""
    background: float = 1.0
    """For aligned faces: weight of a change outside the face, relative to one inside."""
    realism: float = 0.0
    """Weight of −D(x̂, y): the critic D learns to tell x̂, meant to show y, from images of y."""
    rounds: int = 0
    """How often the copy of the model that makes the teacher's counterfactuals is renewed;
    0: the model that is trained makes them."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as in IB-INN and the paper."""

    milestones: tuple[float, ...]
    """Fractions of the run after which the learning rate is divided by ten."""
    momentum: float = 0.9
    """Momentum of all weights except the class means, which have none."""
    means_lr_factor: float = 1.0
    """Learning rate of the class means divided by that of the weights."""

    def __post_init__(self) -> None:
        """Reject milestones given in epochs, as in version 0.1.0."""
        for milestone in self.milestones:
            if not 0 < milestone < 1:
                raise InputError(
                    f"milestones are fractions of the run, between 0 and 1, not {milestone:g}"
                )


@dataclass(frozen=True)
class Recipe:
    """Everything that is needed to train a model again."""

    name: str
    dataset: str
    architecture: Architecture
    beta: float
    """Weight of classification against likelihood (Eq. 9)."""
    label_smoothing: float = 0.0
    tied: bool = True
    """Tie the class means μ to the mean latents of the classes, so that p(x|y) generates images
    of y; otherwise the loss trains them, as in IB-INN."""
    tau: float = 1.0
    """Inverse temperature of the posterior in training."""
    noise: float = 0.0
    """Standard deviation of the Gaussian noise on training pixels in [0, 1]."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    balanced: bool = False
    """Draw equally many images of every class in each epoch, because the prior is uniform."""
    epochs: int = 60
    batch_size: int = 256
    learning_rate: float = 2e-3
    """Peak of a cosine schedule with linear warm-up; the initial learning rate of SGD."""
    warm_up: float = 0.1
    """Share of all steps."""
    sgd: SGD | None = None
    """SGD settings; None trains with AdamW and a cosine schedule."""
    weight_decay: float = 1e-4
    gradient_clip: float = 8.0
    ema_decay: float = 0.999
    """Decay of the moving average (EMA) of the weights that is stored; 0: the last weights."""
    attribute_weight: float = 0.0
    """Weight of an auxiliary task against overfitting: predict all attributes linearly from z."""
    distillation_weight: float = 0.0
    """Share of the teacher's prediction in the targets; the labels make up the rest."""
    init_from: str | None = None
    """Recipe of the model whose layers initialise this one's; it is trained first."""
    finetuning: FineTuning | None = None
    half_precision: bool = True
    """Run subnets in bfloat16 when training on a GPU."""
    stored_bits: int = 16
    """Bits per subnet weight in the model's file: 32, 16 or 8."""
    aligned: bool = False
    """All training images have the same pose, so that rotated or shifted ones can be detected."""
    mnist_framing: bool = False
    """Frame images from files as MNIST frames its digits."""
    face_crop: FaceCrop | None = None
    """Frame faces, from CelebA or from files, as in training; None: images are not faces."""
    framing: Framing | None = None
    """Fit and bit depth of pictures of your own; None: 8 bits, stretched, unless framed above."""
    default_confidence: float | None = None
    """p(q) of the convincing counterfactual if none is requested; None: at the paper's α₁."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the default confidence, and that only faces have a background."""
        if self.default_confidence is not None and not 0.5 < self.default_confidence < 1:
            raise InputError(
                f"default_confidence lies above 0.5 and below 1, not {self.default_confidence}: "
                "choose another, or None for the paper's α₁"
            )
        if self.finetuning and self.finetuning.background != 1 and self.face_crop is None:
            raise InputError(f"{self.name} is not a face model: background must be 1")

    @property
    def planted(self) -> bool:
        """Return whether the class is a mark planted in the picture, and not what it shows."""
        return self.dataset == "fakemnist"

    @property
    def needs_teacher(self) -> bool:
        """Return whether training needs a teacher."""
        return self.distillation_weight > 0 or self.finetuning is not None

    def load(
        self, split: Split, folder: Path | None = None, observe: Observer = ignore
    ) -> Dataset:
        """Load the images of a split; CelebA is read from a folder of the user's."""
        return load_dataset(self.dataset, split, folder, observe, crop=self.face_crop)


MNIST = Recipe(
    name="mnist",
    dataset="mnist",
    architecture=Architecture(
        channels=1,
        height=28,
        width=28,
        classes=10,
        # Two resolutions, as in IB-INN; the numbers are ours.
        stages=(Stage(couplings=24, width=32), Stage(couplings=24, width=64)),
        dense_width=1024,  # ours
        clamp=1.2,  # ours: 1.5 gave a round-trip error of 1e-4
        pixel_scale=2.0,  # IB-INN
        pixel_margin=0.02,  # ours: four standard deviations of the noise
        norm="group",  # ours: images of a batch do not affect each other
    ),
    beta=1.4265,  # paper, Table 1
    # IB-INN has 0.01. In a small model, more counterfactuals reached q at α₁ with 0.03.
    label_smoothing=0.03,
    tau=0.02,  # ours: of 0.02, 0.05 and 0.1, the best counterfactuals of held-out digits
    noise=0.005,  # ours: half of IB-INN's
    # Ours: half of the digits are transformed slightly.
    augmentation=Augmentation(shift=1.5, rotate=10.0, scale=0.1, shear=0.1, share=0.5),
    epochs=36,
    batch_size=512,
    learning_rate=2.8e-3,  # ours: grows with the square root of the batch
    weight_decay=1e-2,
    mnist_framing=True,
    stored_bits=8,
)

MNIST_FINETUNED = replace(
    MNIST,
    name="mnist-finetuned",
    # Ours: chosen on held-out digits (docs/finetuning.md).
    finetuning=FineTuning(epochs=6, faithfulness=4.0, distillation_weight=0.5, realism=0.1),
)

MNIST_PAPER = Recipe(
    # The paper's recipe as a control. Remaining differences from the authors' code:
    # - downsampling: one subnet, which changes half of the channels (IB-INN: two); its first
    #   convolution has the stride (IB-INN: the second); log-scales are clamp·tanh(0.1 s) as in
    #   every coupling (IB-INN: clamp·tanh(0.2 s));
    # - subnets: no ReLU before the first convolution; 3×3 convolutions have a bias, which
    #   BatchNorm cancels;
    # - the DCT is orthonormal (IB-INN: it scales 7×7 images by about 0.44);
    # - the fully connected couplings start as the identity (IB-INN: small random weights), clamp
    #   with tanh (IB-INN: arctan), and each follows a permutation;
    # - class means start in random directions (IB-INN: along blocks of axes), and the class prior
    #   is uniform (IB-INN: learned);
    # - all but 2,000 random images are used for training (IB-INN: all but 1,024).
    name="mnist-paper",
    dataset="mnist",
    architecture=Architecture(
        channels=1,
        height=28,
        width=28,
        classes=10,
        stages=(Stage(24, width=32, dropout=0.0), Stage(24, width=64, dropout=0.25)),  # IB-INN
        dense_width=1024,  # IB-INN
        dense_couplings=2,  # IB-INN: one block that transforms both halves
        dense_dropout=0.5,  # IB-INN
        clamp=0.7,  # IB-INN
        dense_clamp=2.0,  # IB-INN
        class_distance=5.0,  # IB-INN
        pixel_scale=2.0,  # IB-INN
        channel_scale=0.8,  # authors' settings for MNIST
        norm="batch",  # IB-INN
    ),
    beta=1.4265,  # paper, Table 1
    label_smoothing=0.01,  # IB-INN, for MNIST
    tied=False,  # IB-INN
    noise=0.01,  # IB-INN: on pixels in [0, 1], before scaling by 2
    epochs=60,  # paper
    batch_size=128,  # IB-INN
    learning_rate=0.07,  # paper
    # Milestone: paper. Momentum and the means' learning rate: IB-INN.
    sgd=SGD(milestones=(50 / 60,), momentum=0.9, means_lr_factor=3.0),
    weight_decay=1e-4,  # IB-INN: for all weights except the means
    gradient_clip=8.0,  # IB-INN
    ema_decay=0.0,  # IB-INN: none
    half_precision=False,  # IB-INN
    stored_bits=32,  # ours: BatchNorm's statistics may exceed the range of float16
    mnist_framing=True,
)

# Figure 10: one model per β. Ours: a short first stage only.
MNIST_BETA = replace(MNIST, name="mnist-beta", epochs=12)

FAKE_MNIST = Recipe(
    # norm and tau were chosen on held-out images (docs/train-your-own.md).
    name="fakemnist",
    dataset="fakemnist",
    architecture=replace(
        MNIST.architecture,
        # Ours: a third of MNIST's couplings, and narrower, so that a CPU can train it.
        stages=(Stage(couplings=8, width=24), Stage(couplings=8, width=48)),
        dense_width=0,  # ours: to save time; not tried separately
        norm="none",  # ours: statistics of the whole image would carry the dot everywhere
    ),
    beta=1.4265,  # paper, Table 1
    label_smoothing=0.03,
    # Ours: smoothed labels then ask for class means that are as far apart as the dots in the
    # logits of the pixels, 5.4. With 0.05 they ask for 15, and amplify what else the dot changes.
    tau=0.4,
    noise=0.005,  # as for MNIST
    # No augmentation: moving the dot would change the class.
    epochs=6,
    batch_size=128,  # ours: more steps in an epoch, for a CPU
    learning_rate=1.4e-3,
    weight_decay=1e-2,
    stored_bits=8,
)

CELEBA_ATTRIBUTES = Recipe(
    # Initialises the four face models; its layers have learned all forty attributes.
    name="celeba-attributes",
    dataset="celeba/Smiling",
    architecture=Architecture(
        channels=3,
        height=64,
        width=64,
        classes=2,
        # Ours: small enough to ship five models with 8-bit weights.
        stages=(Stage(16, width=80), Stage(16, width=96), Stage(8, width=112)),
        dense_width=0,  # ours: at 8×8 a convolutional coupling sees the whole face
        clamp=1.0,  # ours: training diverged with 2
        pixel_scale=4.0,  # IB-INN
        pixel_margin=0.02,  # ours, as for MNIST
        mixing="cosine",  # ours: rotations would take a fifth of the file
        norm="group",  # ours: batch norm diverges on faces in evaluation mode
        dropout=0.1,  # ours
    ),
    beta=1.0,  # paper, Table 1
    label_smoothing=0.02,  # ours
    tau=0.01,  # ours
    augmentation=Augmentation(shift=3.0, whole_pixels=True, flip=True),
    epochs=75,
    batch_size=512,
    learning_rate=2e-3,
    warm_up=0.05,
    weight_decay=1e-2,
    attribute_weight=4.0,
    aligned=True,
    face_crop=CELEBA_CROP,
    stored_bits=8,
)

# Ours: chosen on validation faces (docs/finetuning.md).
_FACE_TUNING = FineTuning(
    epochs=6,
    faithfulness=0.0,
    distillation_weight=0.25,
    proximity=2.0,
    rounds=3,
    batch_size=256,
    learning_rate=3e-4,
)
# A critic mends mouths and eyes; celeba-lipstick was trained before there was one.
_SMILE_TUNING = replace(_FACE_TUNING, epochs=12, realism=0.1)
_CRITIC_TUNING = replace(_FACE_TUNING, epochs=9, realism=0.1, background=4.0)

CELEBA = tuple(
    replace(
        # Continues from another model with distillation from a teacher.
        CELEBA_ATTRIBUTES,
        name=f"celeba-{name}",
        dataset=f"celeba/{attribute}",
        architecture=replace(
            CELEBA_ATTRIBUTES.architecture,
            # Ours: with a margin of 0.02, skin that is nearly white came out in coloured specks.
            pixel_margin=0.25,
            pixel_scale=6.0,
        ),
        augmentation=Augmentation(shift=4.0, rotate=7.0, scale=0.07, flip=True, share=0.6),
        epochs=epochs,
        learning_rate=1.4e-3,
        warm_up=0.1,
        attribute_weight=8.0,
        ema_decay=0.998,
        distillation_weight=0.8,
        init_from=start,
        finetuning=tuning,
        default_confidence=confidence,  # ours: chosen on validation faces (docs/faces.md)
    )
    for name, attribute, start, epochs, tuning, confidence in (
        # Fewer epochs: the label that celeba-attributes was trained on.
        ("smile", "Smiling", "celeba-attributes", 12, _SMILE_TUNING, 0.99),
        ("cheekbones", "High_Cheekbones", "celeba-smile-plain", 14, _CRITIC_TUNING, 0.98),
        ("lipstick", "Wearing_Lipstick", "celeba-attributes", 30, _FACE_TUNING, 0.98),
        ("makeup", "Heavy_Makeup", "celeba-smile-plain", 14, _CRITIC_TUNING, 0.99),
    )
)

# The control: without fine-tuning for counterfactuals.
CELEBA_SMILE_PLAIN = replace(CELEBA[0], name="celeba-smile-plain", finetuning=None)

_ALL = (
    MNIST,
    MNIST_FINETUNED,
    MNIST_PAPER,
    MNIST_BETA,
    FAKE_MNIST,
    CELEBA_ATTRIBUTES,
    *CELEBA,
    CELEBA_SMILE_PLAIN,
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name."""
    if name not in RECIPES:
        raise InputError(f"no recipe {name!r}; choose one of: {', '.join(RECIPES)}")
    return RECIPES[name]


def require_fitting(data: Dataset, recipe: Recipe) -> None:
    """Raise an `InputError` unless the recipe's network can learn these images and labels."""
    a = recipe.architecture
    if data.images.dtype != torch.uint8:
        raise InputError(f"images must be 8-bit (torch.uint8, 0 to 255), not {data.images.dtype}")
    shape, expected = tuple(data.images.shape[1:]), (a.channels, a.height, a.width)
    if shape != expected or not len(data):
        raise InputError(f"{recipe.name} needs images of {expected}, not {len(data)} of {shape}")
    if len(data.class_names) != a.classes:
        raise InputError(
            f"{recipe.name} has {a.classes} classes, but the dataset names {len(data.class_names)}"
        )
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= a.classes:
        raise InputError(
            f"{recipe.name} has classes 0 to {a.classes - 1}, but labels go from {low} to {high}"
        )


def require_learnable(data: Dataset, recipe: Recipe) -> None:
    """Raise an `InputError` if training would fail on these images, or ignore what they lack."""
    missing = (data.labels.bincount(minlength=recipe.architecture.classes) == 0).nonzero()
    if len(missing):
        classes = ", ".join(str(int(label)) for label in missing)
        raise InputError(f"no training image has class {classes}: use more images")
    if data.attributes is None and (recipe.attribute_weight or recipe.distillation_weight):
        raise InputError(f"{recipe.name} needs attribute labels, but the dataset has none")
    if data.attributes is not None and data.attribute is None and recipe.needs_teacher:
        raise InputError(
            f"{recipe.name} needs a teacher of attributes: set Dataset.attribute to the column "
            "of the label"
        )
    if recipe.finetuning and min(recipe.finetuning.batch_size, len(data)) < 2:
        raise InputError("fine-tuning halves its batches: it needs at least 2 images in each")
