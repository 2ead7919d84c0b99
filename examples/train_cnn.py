"""Train a small network on folders of pictures and export it: a classifier of your own.

python train_cnn.py fashion cnn.onnx
python train_cnn.py fashion cnn.pt2
python train_cnn.py smiles cnn.onnx --epochs 8 --mirror --bfloat16
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn


def read(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Read the pictures of all class folders, with the number of their class."""
    names = sorted(path.name for path in folder.iterdir())
    paths = [(path, names.index(path.parent.name)) for path in sorted(folder.glob("*/*.png"))]
    images = np.stack([np.atleast_3d(Image.open(path)) for path, _ in paths])
    return torch.tensor(images).permute(0, 3, 1, 2), torch.tensor([k for _, k in paths]), names


def network(channels: int, classes: int, side: int = 28) -> nn.Module:
    """Return four convolutions with batch norm, two or three max-pools and a linear layer."""
    layers: list[nn.Module] = []
    for width, pool in ((32, side > 32), (64, True), (96, False), (128, True)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * pool
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def main() -> None:
    """Train, measure and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--mirror", action="store_true", help="mirror half of the batches")
    parser.add_argument(
        "--bfloat16", action="store_true", help="train twice as fast where the processor has it"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels, names = read(given.folder / "train")
    images, labels = images.to(device), labels.to(device)
    cnn = network(images.shape[1], len(names), images.shape[3]).to(device)
    cnn = cnn.to(memory_format=torch.channels_last)
    steps = given.epochs * (len(images) // 100)
    optimiser = torch.optim.AdamW(cnn.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps + 1)
    for _ in range(given.epochs):
        for batch in torch.randperm(len(images), device=device).split(100)[: len(images) // 100]:
            x = (images[batch].float() / 255).contiguous(memory_format=torch.channels_last)
            x = x.flip(3) if given.mirror and torch.rand(()) < 0.5 else x
            with torch.autocast(device, torch.bfloat16, enabled=given.bfloat16):
                logits = cnn(x)
            loss = F.cross_entropy(logits.float(), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    cnn.cpu().eval().to(memory_format=torch.contiguous_format)
    images, labels, _ = read(given.folder / "test")
    with torch.no_grad():
        correct = [
            (cnn(x.float() / 255).argmax(1) == y).float()
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        ]
    print(f"{torch.cat(correct).mean():.2%} of {len(images):,} test pictures are right")
    export(cnn, images[:2].float() / 255, given.out)


def export(cnn: nn.Module, pixels: Tensor, path: Path) -> None:
    """Write the network for batches of any size, as ONNX or as a program of torch.export."""
    if path.suffix == ".pt2":
        batch = {0: torch.export.Dim("batch")}
        torch.export.save(torch.export.export(cnn, (pixels,), dynamic_shapes=(batch,)), path)
        return
    torch.onnx.export(
        cnn,
        (pixels,),
        str(path),
        input_names=["pixels"],
        output_names=["logits"],
        dynamic_axes={"pixels": {0: "batch"}, "logits": {0: "batch"}},
        dynamo=False,
    )


if __name__ == "__main__":
    main()
