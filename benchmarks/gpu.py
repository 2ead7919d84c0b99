"""What a counterfactual costs on a GPU, with and without CUDA graphs, and whether both agree.

python benchmarks/gpu.py mnist celeba-smile
"""

import sys
import time
from collections.abc import Callable

import torch

import ecinn
from ecinn.flow.captured import Captured
from ecinn.model import Model
from ecinn.pixels import Images, to_pixels

BATCHES = (1, 8, 64, 128, 256, 512, 1024)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Mean time of a call that ends on the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def without_graphs(model: Model) -> Model:
    """Return the same model, which starts every operation one by one."""
    plain = Model(model.checkpoint, "cuda")
    network = model.classifier.fused()
    captured = network.inn
    assert isinstance(captured, Captured)
    network._modules["inn"] = captured.bijection
    plain._fused = plain.classifier, network
    return plain


def counterfactual(model: Model, x: Images) -> Images:
    """Move half the way from class 0 to class 1."""
    z, _ = model.encode_with_log_det(x)
    return model.decode(z + 0.5 * (model.mu_bar[1] - model.mu_bar[0]))


@torch.inference_mode()
def main() -> None:
    """Print a table for every model that is named."""
    for name in sys.argv[1:] or ("mnist",):
        model = ecinn.load(name, "cuda")
        plain = without_graphs(model)
        labels = torch.arange(BATCHES[-1]) % len(model.class_names)
        images = model.sample(labels, temperature=0.7)
        print(f"{name} on {torch.cuda.get_device_name()}: ms, and images per second")
        for batch in BATCHES:
            x = to_pixels(images[:batch])
            graphs, one_by_one = (
                milliseconds(lambda m=m, x=x: counterfactual(m, x)) for m in (model, plain)
            )
            difference = (counterfactual(model, x) - counterfactual(plain, x)).abs().max()
            print(
                f"{batch:5} captured {graphs:7.2f} ({1e3 * batch / graphs:,.0f}/s)  "
                f"not captured {one_by_one:7.2f}  largest difference {float(difference):.1e}"
            )
            if batch in (1, 128, 1024):
                shown = images[:batch]
                q = (model.predict(shown).argmax(1) + 1) % len(model.class_names)
                both = (
                    milliseconds(lambda m=m, x=shown, q=q: m.explain(x, q[:, None]), 5)
                    for m in (model, plain)
                )
                print("      explain, checked: {:.2f} against {:.2f}".format(*both))


if __name__ == "__main__":
    main()
