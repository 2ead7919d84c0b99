"""What a counterfactual costs in forward passes: a ratio, measured in one run."""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import ecinn
from ecinn.explanation.counterfactual import counterfactual
from ecinn.pixels import to_pixels


def seconds(*calls: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each call, the calls taking turns so that drift hits all alike."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, kept in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


def main() -> None:
    """Print the table; with --json, one object."""
    model = ecinn.load("mnist")
    images = to_pixels(model.checkpoint.recipe.load("test").images[:128])
    rows = []
    with torch.inference_mode():
        for batch, repeats in ((1, 60), (128, 8)):
            x = images[:batch]
            q = (model.classifier.predict(x) + 1) % 10
            forward, bare, whole, verified = seconds(
                lambda x=x: model.classifier.encode(x),
                lambda x=x, q=q: counterfactual(model.classifier, model.mu_bar, x, q),
                lambda x=x, q=q: model.explain(x, q[:, None], confidence="alpha_1", check=False),
                lambda x=x, q=q: model.explain(x, q[:, None], confidence="alpha_1"),
                repeats=repeats,
            )
            rows.append(
                {
                    "batch": batch,
                    "forward_ms": round(1000 * forward, 2),
                    "counterfactual": round(bare / forward, 2),
                    "explanation": round(whole / forward, 2),
                    "explanation_verified": round(verified / forward, 2),
                }
            )
    if "--json" in sys.argv:
        print(json.dumps(rows, indent=1))
        return
    print("cost in forward passes (median, same run)")
    print(f"{'batch':>6} {'forward':>10} {'x̂ at α₁':>9} {'both + round trip':>18} {'verified':>9}")
    for row in rows:
        print(
            f"{row['batch']:>6} {row['forward_ms']:>7} ms {row['counterfactual']:>9} "
            f"{row['explanation']:>18} {row['explanation_verified']:>9}"
        )


if __name__ == "__main__":
    main()
