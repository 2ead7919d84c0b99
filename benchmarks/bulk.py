"""Memory and speed of `ecinn bulk` against the size of the dataset, and of `Model.explain`.

    python benchmarks/bulk.py --sizes 1000,8000 --target 8

Each run is a process of its own on one core; its peak memory is the largest resident set.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

import ecinn
from ecinn.data.mnist import load_mnist
from ecinn.drawing.pictures import image_array, png_bytes, to_image


def write_pictures(count: int, path: Path) -> None:
    """Write test digits as PNG files into a zip archive."""
    images = load_mnist("test").images
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            picture = to_image(image_array(images[number % len(images)]))
            archive.writestr(f"{number:06}.png", png_bytes(picture))


def run(source: Path, target: str, out: Path) -> dict[str, float]:
    """Return seconds and peak memory of a run in a process of its own."""
    command = [sys.executable, "-m", "ecinn", "bulk", source, "--target", target, "--out", out,
               "--device", "cpu", "--json"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(map(str, command), stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    rows = json.loads(process.stdout.read())["rows"]
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    seconds, cpu = time.perf_counter() - start, used.ru_utime + used.ru_stime
    return {"rows": rows, "seconds": seconds, "cpu_seconds": cpu, "mib": used.ru_maxrss / 1024}


def in_one_loop(count: int, target: str) -> float:
    """Return the CPU seconds of `Model.explain` for the same digits."""
    torch.set_num_threads(1)
    model, images = ecinn.load("mnist", "cpu"), load_mnist("test").images[:count]
    model.explain(images[:8], "all")
    images = images[model.predict(images).argmax(1) != model.targets(target)]
    start = time.process_time()
    model.explain(images, target)
    return (time.process_time() - start) / len(images)


def main() -> None:
    """Print a line for every size, and one for the loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,8000")
    parser.add_argument("--target", default="8")
    options = parser.parse_args()
    for size in map(int, options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(size, Path(folder) / "digits.zip")
            used = run(Path(folder) / "digits.zip", options.target, Path(folder) / "out")
        each = 1000 * used["cpu_seconds"] / size
        print(f"{size:>7,} pictures: {used['seconds']:.0f} s, {each:.1f} ms of CPU time each, "
              f"peak {used['mib']:.0f} MiB")  # fmt: skip
    print(f"Model.explain in one loop: {1000 * in_one_loop(512, options.target):.1f} ms each")


if __name__ == "__main__":
    main()
