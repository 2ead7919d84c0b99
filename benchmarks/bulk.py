"""Memory and speed of `ecinn bulk` against the size of the dataset, and of `Model.explain`.

    python benchmarks/bulk.py --sizes 1000,8000 --target 8

Memory is the largest resident set of a process of its own; times are those of one thread.
"""

import argparse
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


def write_pictures(images: torch.Tensor, count: int, path: Path) -> None:
    """Write digits as PNG files into a zip archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            picture = to_image(image_array(images[number % len(images)]))
            archive.writestr(f"{number:06}.png", png_bytes(picture))


REPORTING = """
import atexit, re, runpy, sys
status = lambda: open("/proc/self/status").read()
atexit.register(lambda: print("peak:", re.search(r"VmHWM:\\s+(\\d+) kB", status())[1]))
runpy.run_module("ecinn", run_name="__main__", alter_sys=True)
"""
"""Runs `ecinn` and prints its own peak: what `wait4` returns is at least the parent's memory."""


def peak_memory(source: Path, target: str, out: Path) -> float:
    """Return the peak memory in MiB of a run in a process of its own, on Linux."""
    words = ["bulk", source, "--target", target, "--out", out, "--device", "cpu"]
    command = [sys.executable, "-c", REPORTING, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.rpartition("peak:")[2]) / 1024


def cpu_times(count: int, target: str, folder: Path) -> tuple[float, float]:
    """Return CPU seconds of a picture: of a bulk run, and of `Model.explain` on the array."""
    torch.set_num_threads(1)
    model, images = ecinn.load("mnist", "cpu"), load_mnist("test").images[:count]
    others = images[model.predict(images).argmax(1) != model.targets(target)]
    write_pictures(others, len(others), folder / "digits.zip")
    start = time.process_time()
    ecinn.explain_dataset(
        folder / "digits.zip", folder / "out", model="mnist", target=target, device="cpu"
    )
    middle = time.process_time()
    model.explain(others, target)
    return (middle - start) / len(others), (time.process_time() - middle) / len(others)


def main() -> None:
    """Print the peak memory for every size, and both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,8000")
    parser.add_argument("--target", default="8")
    options = parser.parse_args()
    for size in map(int, filter(None, options.sizes.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "digits.zip"
            write_pictures(load_mnist("test").images, size, source)
            peak = peak_memory(source, options.target, Path(folder) / "out")
        print(f"{size:,} pictures: peak memory {peak:.0f} MiB")
    with tempfile.TemporaryDirectory() as folder:
        bulk, loop = cpu_times(512, options.target, Path(folder))
    print(f"CPU time of a picture: {1000 * bulk:.1f} ms, Model.explain {1000 * loop:.1f} ms")


if __name__ == "__main__":
    main()
