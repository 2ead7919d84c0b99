"""What a counterfactual costs on a GPU: with kernels, with CUDA graphs alone, and with neither.

python benchmarks/gpu.py mnist celeba-smile
"""

import sys
import time
from collections.abc import Callable

import torch

import ecinn
from ecinn.flow import kernels
from ecinn.flow.bijections import Bijection
from ecinn.flow.captured import Captured
from ecinn.flow.fused import fused
from ecinn.model import Model
from ecinn.pixels import Images, to_pixels

BATCHES = (1, 64, 128, 256, 1024)
SECONDS, FEWEST = 0.5, 3
"""Each call is repeated for this many seconds, but at least this often."""


def milliseconds(call: Callable[[], object]) -> float:
    """Mean time of a call that ends on the GPU, over `SECONDS` or a few calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    calls, start = 0, time.perf_counter()
    while calls < FEWEST or time.perf_counter() - start < SECONDS:
        call()
        torch.cuda.synchronize()
        calls += 1
    return 1e3 * (time.perf_counter() - start) / calls


def with_flow(model: Model, flow: Bijection) -> Model:
    """Return the same model, which computes with this flow."""
    same = Model(model.checkpoint, "cuda")
    network = same.classifier.fused()
    network._modules["inn"] = flow
    same._fused = same.classifier, network
    return same


def counterfactual(model: Model, x: Images) -> Images:
    """Move half the way from class 0 to class 1."""
    z, _ = model.encode_with_log_det(x)
    return model.decode(z + 0.5 * (model.mu_bar[1] - model.mu_bar[0]))


def round_trip(model: Model, x: Images) -> Images:
    """f⁻¹(f(x))."""
    return model.decode(model.encode_with_log_det(x)[0])


def largest(difference: Images) -> str:
    """Return the largest absolute value as text."""
    return f"{float(difference.abs().max()):.1e}"


@torch.inference_mode()
def main() -> None:
    """Print a table for every model that is named."""
    kernels.try_out(torch.device("cuda"))  # says why, if they cannot be used
    for name in sys.argv[1:] or ("mnist",):
        model = ecinn.load(name, "cuda")
        inn = model.classifier.inn
        models = (
            with_flow(model, Captured(fused(inn, kernels))),
            with_flow(model, Captured(fused(inn))),
            with_flow(model, fused(inn)),
        )
        labels = torch.arange(BATCHES[-1]) % len(model.class_names)
        images = model.sample(labels, temperature=0.7)
        print(f"{name} on {torch.cuda.get_device_name()}: ms, and images per second")
        print("batch, captured with kernels, captured without kernels, not captured")
        for batch in BATCHES:
            x = to_pixels(images[:batch])
            times = [milliseconds(lambda m=m, x=x: counterfactual(m, x)) for m in models]
            print(f"{batch:5}", *(f"{ms:8.2f} ({1e3 * batch / ms:,.0f}/s)" for ms in times))
            *ours, last = (counterfactual(m, x) for m in models)
            print("      largest difference from the last:", *(largest(y - last) for y in ours))
            print("      round trip:", *(largest(round_trip(m, x) - x) for m in models))
            if batch in (1, 128, 1024):
                shown = images[:batch]
                q = (model.predict(shown).argmax(1) + 1) % len(model.class_names)
                times = [
                    milliseconds(lambda m=m, x=shown, q=q: m.explain(x, q[:, None]))
                    for m in models
                ]
                print("      explain, checked:", *(f"{ms:.2f}" for ms in times))


if __name__ == "__main__":
    main()
