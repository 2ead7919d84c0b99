"""The same pictures as every kind of data that `ecinn bulk` reads."""

import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet

KINDS = ("folder", "zip", "tar", "tar.gz", "shards", "bytes", "struct", "paths", "npy")


def png(image: torch.Tensor) -> bytes:
    """Encode a grey 8-bit image."""
    buffer = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def write_shard(path: Path, files: Sequence[bytes]) -> Path:
    """Write a WebDataset shard: every sample has a picture and a label."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for number, content in enumerate(files):
            for suffix, data in (("cls", b"7"), ("png", content)):
                member = tarfile.TarInfo(f"{number:03}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def write_table(path: Path, values: list[object], column: str = "image", group: int = 4) -> Path:
    """Write a Parquet file with a column of pictures and another one."""
    table = pyarrow.table({"other": list(range(len(values))), column: values})
    parquet.write_table(table, path, row_group_size=group)
    return path


def write_dataset(folder: Path, kind: str, files: Sequence[bytes]) -> tuple[Path, list[str]]:
    """Write contents of picture files as data of some kind; return its path and all keys."""
    folder.mkdir()
    names = [f"{'ab'[n % 2]}/{n:03}.png" for n in range(len(files))]
    in_order = sorted(names)
    if kind in ("folder", "paths"):
        for name, content in zip(names, files, strict=True):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        (folder / "a" / "readme.txt").write_text("no picture")
        if kind == "folder":
            return folder, in_order
        (folder / "tables").mkdir()
        path = write_table(folder / "tables" / "t.parquet", [f"../{name}" for name in names])
        return path, [f"t.parquet/{n}" for n in range(len(files))]
    if kind == "zip":
        with zipfile.ZipFile(folder / "x.zip", "w") as archive:
            for name, content in zip(names, files, strict=True):
                archive.writestr(name, content)
        return folder / "x.zip", in_order
    if kind in ("tar", "tar.gz"):
        path = write_shard(folder / f"s.{kind}", files)
        return path, [f"{path.name}/{n:03}.png" for n in range(len(files))]
    if kind == "shards":
        half = len(files) // 2
        write_shard(folder / "s-0.tar", files[:half])
        write_shard(folder / "s-1.tar", files[half:])
        return folder, [
            f"s-{int(n >= half)}.tar/{n % half if n < half else n - half:03}.png"
            for n in range(len(files))
        ]
    if kind == "npy":
        images = np.stack([np.asarray(Image.open(io.BytesIO(content))) for content in files])
        np.save(folder / "x.npy", images)
        return folder / "x.npy", [str(n) for n in range(len(files))]
    values = {"bytes": list(files), "struct": [{"bytes": f, "path": None} for f in files]}
    path = write_table(folder / "t.parquet", values[kind])
    return path, [f"t.parquet/{n}" for n in range(len(files))]
