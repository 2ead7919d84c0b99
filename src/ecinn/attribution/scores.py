"""F(x), the score of a pair of classes that gradient methods attribute to pixels."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.pixels import Images, Labels

Logit = Literal["linear", "density"]


class FlowLogits(nn.Module):
    """Class scores of a flow, of which the softmax is p(y|x) of Eq. 2.

    "linear": z·μ_y − ½‖μ_y‖²; "density": −½‖z − μ_y‖², which is quadratic in z.
    """

    def __init__(self, classifier: GenerativeClassifier, logit: Logit) -> None:
        super().__init__()
        self.classifier = classifier
        self.logit = logit
        self.training = classifier.training

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Score every class."""
        # Not `encode`, which splits large batches: DeepLift needs x and its baseline in one.
        z: Tensor = self.classifier.inn(x)[0]
        if self.logit == "linear":
            return equations.linear_logits(z, self.classifier.mu)
        return -0.5 * (z[:, None] - self.classifier.mu).square().sum(-1)


class PairScore(nn.Module):
    """F(x) = s_q(x) − s_p(x), or −s_p(x) alone if `ignore_q`."""

    def __init__(self, scores: nn.Module, *, ignore_q: bool = False) -> None:
        super().__init__()
        self.scores = scores
        self.ignore_q = ignore_q

    def forward(self, x: Images, p: Labels, q: Labels) -> Float[Tensor, " batch"]:
        """F of every image for its pair of classes."""
        return self.compare(self.scores(x), p, q)

    def compare(
        self,
        scores: Float[Tensor, "*batch classes"],
        p: Int[Tensor, "*batch"],
        q: Int[Tensor, "*batch"],
    ) -> Float[Tensor, "*batch"]:
        """F from the scores of all classes."""
        score_p, score_q = scores.gather(-1, torch.stack([p, q], -1)).unbind(-1)
        return -score_p if self.ignore_q else score_q - score_p


@dataclass(frozen=True)
class ExplainedINN:
    """An invertible classifier with its class means μ̄ and the score that is attributed."""

    classifier: GenerativeClassifier
    mu_bar: Float[Tensor, "classes dim"]
    logit: Logit = "linear"
    """Score of the gradient methods: "linear" is fair to them, "density" is the paper's."""

    @property
    def score(self) -> PairScore:
        """The F that is attributed."""
        # The paper only says that Captum was used. Captum asks for one class, and IB-INN's output
        # for it is −½‖z − μ_p‖². (The difference of two such outputs is the linear score.)
        return PairScore(FlowLogits(self.classifier, self.logit), ignore_q=self.logit == "density")
