"""What heatmaps attribute: the score of a pair of classes, of an INN or of any other network."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.errors import InputError
from ecinn.explanation.result import Images

Logit = Literal["linear", "density"]
Scores = Float[Tensor, "*batch classes"]
Classes = Int[Tensor, " batch"]


class LinearLogits(nn.Module):
    """z·μ_y − ½‖μ_y‖² of every class: the posterior of Eq. 2, linear in z."""

    def __init__(self, classifier: GenerativeClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Scores of which the softmax is p(y|x)."""
        # Not `encode`, which cuts a large batch: DeepLift needs x and its baseline in one.
        z, _ = self.classifier.inn(x)
        return equations.linear_logits(z, self.classifier.mu)


class DensityLogits(LinearLogits):
    """−½‖z − μ_y‖² of every class: the same posterior, quadratic in z."""

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Scores of which the softmax is p(y|x)."""
        z: Tensor = self.classifier.inn(x)[0]
        return -0.5 * (z[:, None] - self.classifier.mu).square().sum(-1)


class PairScore(nn.Module):
    """F(x) = s_q(x) − s_p(x), the log-odds of q against p."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: Images, p: Classes, q: Classes) -> Float[Tensor, " batch"]:
        """F of every image for its own pair."""
        return self.compare(self.scores(x), p, q)

    def compare(
        self, scores: Scores, p: Int[Tensor, "*batch"], q: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """F from all classes' scores."""
        of_p, of_q = scores.gather(-1, torch.stack([p, q], -1)).unbind(-1)
        return of_q - of_p


class DepartureScore(PairScore):
    """F(x) = −s_p(x): away from p, wherever that leads."""

    def compare(
        self, scores: Scores, p: Int[Tensor, "*batch"], q: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """F from all classes' scores."""
        return -scores.gather(-1, p[..., None]).squeeze(-1)


@runtime_checkable
class Explainer(Protocol):
    """What `ecinn.load` gives: an INN with its measured means."""

    classifier: GenerativeClassifier
    mu_bar: Float[Tensor, "classes dim"]


@dataclass(frozen=True)
class ExplainedINN:
    """An INN as `heatmaps` takes it."""

    classifier: GenerativeClassifier
    mu_bar: Float[Tensor, "classes dim"]
    logit: Logit = "linear"
    """What the gradient methods attribute: "linear" is fair to them, "density" the paper's."""

    @property
    def score(self) -> PairScore:
        """The F that is attributed."""
        if self.logit not in get_args(Logit):
            raise InputError(f"logit is linear or density, not {self.logit!r}")
        if self.logit == "linear":
            return PairScore(LinearLogits(self.classifier))
        # The paper only says that Captum was used. Captum asks for one class, and what IB-INN puts
        # out for it is −½‖z − μ_p‖². (A difference of two such is the linear one.)
        return DepartureScore(DensityLogits(self.classifier))
