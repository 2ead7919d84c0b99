"""Memory of training and calibration against the number of pictures, which a mapped file holds.

    python benchmarks/training_memory.py --sizes 5000,40000

Every size is a process of its own. "Own" memory leaves out pages of the mapped file, which the
system takes back when it needs them.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import ecinn

SHAPE = (3, 32, 32)


def write_pictures(count: int, path: Path) -> None:
    """Write noise whose upper half is brighter in every second picture."""
    images = np.lib.format.open_memmap(path, "w+", np.uint8, (count, *SHAPE))
    random = np.random.default_rng(0)
    for start in range(0, count, 1000):
        part = images[start : start + 1000]
        part[:] = random.integers(40, 140, part.shape)
        part[1::2, :, :16] += 90


def resident(kind: str) -> float:
    """Return memory of this process in MiB: VmHWM or RssAnon of Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def measure(path: Path, folder: Path) -> None:
    """Train one epoch and calibrate; print the largest memory, all and without the file."""
    torch.set_num_threads(1)
    images = torch.from_numpy(np.load(path, mmap_mode="c"))
    data = ecinn.Dataset(images, torch.arange(len(images)) % 2, ("dark", "bright"))
    stages = (ecinn.Stage(1, 4), ecinn.Stage(1, 4))
    architecture = ecinn.Architecture(*SHAPE, 2, stages, dense_width=0)
    recipe = ecinn.Recipe("memory", "memory", architecture, 1.0, epochs=1, batch_size=64)
    own = [0.0]

    def watch() -> None:
        while True:
            own[0] = max(own[0], resident("RssAnon"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    ecinn.train(recipe, data, folder, held_out=data.first(len(data) // 10), device="cpu")
    print(f"{len(images):,} pictures: {resident('VmHWM'):.0f} MiB, {own[0]:.0f} MiB own")


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="5000,40000")
    parser.add_argument("--measure", type=Path, help="for the processes that this one starts")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, options.measure.parent / "run")
        return
    for size in map(int, options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pictures.npy"
            write_pictures(size, path)
            subprocess.run([sys.executable, __file__, "--measure", path], check=True)


if __name__ == "__main__":
    main()
