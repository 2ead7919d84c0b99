"""Small judges of faces for tests."""

import torch
from torch import nn

from ecinn.data.augmentation import Augmentation
from ecinn.data.celeba import ATTRIBUTES
from ecinn.studies.face_judges import FaceJudges, FaceJudgeSettings
from ecinn.training.augmented import TeacherSettings
from helpers.builders import randomise

SMALL_FACE_JUDGES = FaceJudgeSettings(
    residual_widths=(2, 4, 6, 6),
    separable_widths=(4, 6, 8, 10),
    separable_depths=(1, 2, 1),
    training=TeacherSettings(
        epochs=1, batch_size=16, augmentation=Augmentation(1.0, flip=True), seed=100
    ),
)


def random_face_judges(seed: int = 0) -> FaceJudges:
    """Small judges of random weights, whose norms have the statistics of noise."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        judges = randomise(FaceJudges(len(ATTRIBUTES), SMALL_FACE_JUDGES), seed)
        for module in judges.train().modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        for network in judges.networks.values():
            network(torch.rand(40, 3, 16, 16))
    rates = dict.fromkeys(ATTRIBUTES, 0.1)
    judges.record = {"errors": {"test": dict.fromkeys(judges.networks, rates)}}
    return judges.eval().requires_grad_(requires_grad=False)
