"""Streams: every picture exactly once, whatever the kind of data, the blocks and their order."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from ecinn.data.photographs import open_picture
from ecinn.data.streams import Block, Blocks, open_stream
from ecinn.errors import InputError
from helpers.builders import random_images
from helpers.datasets import KINDS, png, write_dataset, write_shard, write_table


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_every_picture_once_in_any_order(kind: str, tmp_path: Path) -> None:
    draw = random.Random(kind)
    images = random_images(draw.randint(9, 20), 1, 3, seed=draw.randint(0, 99)).images
    path, keys = write_dataset(tmp_path / "in", kind, [png(image) for image in images])
    stream = open_stream(path)
    assert len(stream) == len(images)
    blocks = list(stream.blocks(draw.randint(1, 6)))
    assert [block.number for block in blocks] == list(range(len(blocks)))
    for order in (blocks, blocks[2:], draw.sample(blocks, len(blocks))):
        source, found = Blocks(stream.kind, "image"), {}
        for block in order:
            for key, load in source.read(block):
                assert key not in found
                content = load()
                found[key] = (
                    content[0] if isinstance(content, np.ndarray)
                    else np.asarray(open_picture(content, []).image)
                )  # fmt: skip
        if order is blocks:
            assert list(found) == keys
        assert len(found) == sum(block.count for block in order)
        by_name = {name: place for place, name in enumerate(keys)}
        numbers = [int(key.split("/")[1][:3]) if kind in ("folder", "zip") else by_name[key]
                   for key in found]  # fmt: skip
        for number, pixels in zip(numbers, found.values(), strict=True):
            np.testing.assert_array_equal(pixels, images[number, 0].numpy())
        source.close()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_files_of_one_name_in_several_folders_have_keys_of_their_own(
    kind: str, tmp_path: Path
) -> None:
    files = [png(image) for image in random_images(5, 1, 3, seed=8).images]
    write = write_shard if kind == "tar" else write_table
    for folder, some in (("test", files[:2]), ("train", files[2:])):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / f"a.{kind}", some)
    source, stream = Blocks(kind), open_stream(tmp_path)
    found = [(key, load()) for block in stream.blocks(2) for key, load in source.read(block)]
    ends = [f"{n:03}.png" if kind == "tar" else f"{n}" for n in (0, 1, 0, 1, 2)]
    folders = ["test", "test", "train", "train", "train"]
    names = [f"{folder}/a.{kind}/{end}" for folder, end in zip(folders, ends, strict=True)]
    assert found == [*zip(names, files, strict=True)]
    alone = open_stream(tmp_path / "test" / f"a.{kind}")
    assert next(source.read(next(alone.blocks(2))))[0] == f"a.{kind}/{ends[0]}"


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "npy"])
def test_a_column_is_refused_where_there_is_none(kind: str, tmp_path: Path) -> None:
    images = random_images(2, 1, 3, seed=9).images
    path, _ = write_dataset(tmp_path / "in", kind, [png(image) for image in images])
    with pytest.raises(InputError, match="no Parquet tables"):
        open_stream(path, "image")


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "shards", "bytes", "npy"])
def test_data_that_may_not_be_read_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = random_images(2, 1, 3, seed=9).images
    path, _ = write_dataset(tmp_path / "in", kind, [png(image) for image in images])
    denied = path / "s-1.tar" if kind == "shards" else path
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != denied)
    with pytest.raises(InputError) as error:
        open_stream(path)
    assert str(error.value) == f"cannot read {denied}: change its permissions"


@pytest.mark.parametrize("kind", KINDS)
def test_the_version_changes_with_the_pictures(kind: str, tmp_path: Path) -> None:
    images = random_images(9, 1, 3, seed=1).images
    versions = []
    for count in (8, 8, 9):
        folder = tmp_path / str(len(versions))
        path, _ = write_dataset(folder, kind, [png(image) for image in images[:count]])
        versions.append(open_stream(path).version)
        versions.append(open_stream(path).version)
    assert versions[0] == versions[1]
    assert versions[4] not in versions[:4]


def damaged(kind: str, folder: Path) -> Path:
    files = [png(image) for image in random_images(6, 1, 3, seed=2).images]
    folder.mkdir()
    if kind.startswith("parquet"):
        path = write_table(folder / "x.parquet", files, "picture" if "column" in kind else "image")
        if "cut" in kind:
            path.write_bytes(path.read_bytes()[:-9])
        return path
    if kind == "numbers":
        return write_table(folder / "x.parquet", [1.5, 2.5])
    path = write_shard(folder / ("x.tar.gz" if "gz" in kind else "x.tar"), files)
    content = bytearray(path.read_bytes())
    if "cut" in kind:
        content = content[: 200 if "gz" in kind else 7000]  # within a picture
    if "header" in kind:
        content[4 * 512 : 4 * 512 + 100] = b"?" * 100  # the header of the second picture or so
    path.write_bytes(b"" if kind == "nothing" else bytes(content))
    return path


@pytest.mark.parametrize(
    "kind",
    ["tar cut", "tar.gz cut", "tar header", "nothing", "parquet cut", "parquet column", "numbers"],
)
def test_damaged_files_are_refused_before_anything_is_explained(kind: str, tmp_path: Path) -> None:
    path = damaged(kind, tmp_path / "in")
    with pytest.raises(InputError) as error:
        open_stream(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    if kind == "parquet column":
        assert "'image'" in str(error.value)
        assert "picture" in str(error.value)
        assert len(open_stream(path, "picture")) == 6


def test_a_damaged_row_group_fails_for_its_rows_alone(tmp_path: Path) -> None:
    files = [png(image) for image in random_images(12, 1, 3, seed=3).images]
    path = write_table(tmp_path / "x.parquet", files)
    where = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    content = bytearray(path.read_bytes())
    start = where.dictionary_page_offset or where.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))
    for size in (3, 12):  # blocks begin before, in and after it
        failed = []
        for block in open_stream(path).blocks(size):
            for key, load in Blocks("parquet").read(block):
                try:
                    assert load() == files[int(key.split("/")[1])]
                except InputError as error:
                    assert "row group 1" in str(error)  # noqa: PT017
                    failed.append(key)
        assert failed == [f"x.parquet/{row}" for row in range(4, 8)]


def test_files_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    files = [png(image) for image in random_images(6, 1, 3, seed=4).images]
    path = write_shard(tmp_path / "x.tar", files)
    (block,) = open_stream(path).blocks(9)
    write_shard(path, files[:4])
    with pytest.raises(InputError, match="changed"):
        list(Blocks("tar").read(block))


def test_empty_files_among_others_are_noted(tmp_path: Path) -> None:
    files = [png(image) for image in random_images(3, 1, 3, seed=5).images]
    write_shard(tmp_path / "a.tar", files)
    write_shard(tmp_path / "b.tar", [])
    stream = open_stream(tmp_path)
    assert (len(stream), stream.notes) == (3, ("b.tar holds no pictures",))
    assert [block.path for block in stream.blocks(2)] == [str(tmp_path / "a.tar")] * 2
    (tmp_path / "a.tar").unlink()
    with pytest.raises(InputError, match="holds no pictures"):
        open_stream(tmp_path)


@pytest.mark.parametrize("files", [[], ["a.txt"], ["a.png", "b.tar"], ["a.tar", "b.parquet"]])
def test_folders_of_nothing_or_of_several_kinds_are_refused(
    files: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="different kinds" if len(files) > 1 else "no pictures"):
        open_stream(tmp_path)


def test_blocks_of_names_are_read_as_they_were_listed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    block = Block(0, str(tmp_path), 0, 2, ("a.png", "gone.png"))
    found = [(key, load()) for key, load in Blocks("folder").read(block)]
    assert found == [("a.png", tmp_path / "a.png"), ("gone.png", tmp_path / "gone.png")]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    picture = png(random_images(1, 1, 3, seed=6).images[0])
    for name in ("in/a", "in/b", "elsewhere"):
        tmp_path.joinpath(name).mkdir(parents=True)
        tmp_path.joinpath(name, "x.png").write_bytes(picture)
    links = {"c": "../elsewhere", "a/up": "..", "a/self": ".", "a/d": "../b", "b/e": "../a"}
    for name, target in links.items():
        tmp_path.joinpath("in", name).symlink_to(target, target_is_directory=True)
    expected = {"a/x.png", "b/x.png", "c/x.png", "a/d/x.png", "b/e/x.png"}
    assert {*open_stream(tmp_path / "in").names} == expected


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipes_are_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    """Opened, a pipe would be waited for."""
    (tmp_path / "a.png").write_bytes(png(random_images(1, 1, 3, seed=7).images[0]))
    os.mkfifo(tmp_path / "b.png")
    stream = open_stream(tmp_path)
    assert stream.names == ("a.png", "b.png")
    (block,) = stream.blocks(4)
    (_, picture), (_, pipe) = Blocks(stream.kind).read(block)
    open_picture(picture(), [])
    with pytest.raises(InputError, match="is a pipe"):
        open_picture(pipe(), [])
