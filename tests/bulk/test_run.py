"""Runs: parts that are whole, restarts that lose and repeat nothing, and one line per problem."""

import contextlib
import errno
import inspect
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import ecinn
from ecinn.bulk.run import Job, Summary
from ecinn.data.streams import open_stream
from helpers.builders import random_images, small_model
from helpers.command_line import fails, run
from helpers.datasets import png, write_dataset, write_shard, write_table
from helpers.paths import REPOSITORY

PICTURES, LARGE = 11, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    small_model().save(path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    files = [png(image) for image in random_images(PICTURES, 1, 3, seed=31).images]
    files[5] = b"no picture"
    folder, _ = write_dataset(tmp_path / "in", "folder", files)
    (folder / "a" / "readme.txt").unlink()
    return folder


def table(out: Path) -> pyarrow.Table:
    return parquet.read_table(out).sort_by([("key", "ascending"), ("target", "ascending")])


@pytest.mark.parametrize("kind", ["zip", "shards", "struct", "npy"])
def test_every_kind_of_data_gives_the_same_rows(kind: str, model: Path, tmp_path: Path) -> None:
    images = random_images(PICTURES, 1, 3, seed=32).images
    files = [png(image) for image in images]
    path, keys = write_dataset(tmp_path / "in", kind, files)
    code, _, _ = run("bulk", path, "--model", model, "--out", tmp_path / "o", "--part-size", 4)
    assert code == 0
    found = parquet.read_table(tmp_path / "o")
    assert Counter(found["key"].to_pylist()) == dict.fromkeys(keys, 2)
    assert json.loads(found.schema.metadata[b"class_names"]) == ["a", "b", "c"]
    # Files are framed as digits, arrays are taken as they are.
    predicted = ecinn.load(model).predict(images if kind == "npy" else files).argmax(1)
    for row in found.to_pylist():
        number = int(row["key"][2:5]) if kind == "zip" else keys.index(row["key"])
        assert row["predicted"] == "abc"[predicted[number]] != row["target"]


def test_webdataset_holds_the_same_as_parquet(model: Path, pictures: Path, tmp_path: Path) -> None:
    common = ("bulk", pictures, "--model", model, "--target", "a,2", "--part-size", 3,
              "--tipping-point", "--out")  # fmt: skip
    assert run(*common, tmp_path / "p")[0] == 0
    assert run(*common, tmp_path / "w", "--format", "webdataset")[0] == 0
    rows = []
    for path in sorted((tmp_path / "w").glob("part-*.tar")):
        samples: dict[str, dict] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, suffix = member.name.partition(".")
                content = archive.extractfile(member).read()
                values = json.loads(content) if suffix == "json" else {suffix[:-4]: content}
                samples.setdefault(key, {}).update(values)
        rows += samples.values()
    expected = [
        {key: value for key, value in row.items() if value is not None}
        for row in parquet.read_table(tmp_path / "p").to_pylist()
    ]
    assert len(rows) == len(expected) == 2 * PICTURES
    assert all("error" in row for row in rows)
    for row, other in zip(rows, expected, strict=True):
        for name in ("certificate", "tipping_certificate"):
            if name in other:
                other[name].pop("answer")
        assert {key: value for key, value in row.items() if value is not None} == other
    with Image.open(io.BytesIO(rows[0].get("counterfactual") or rows[1]["counterfactual"])) as cf:
        assert cf.size == (8, 8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that take long enough to decode for a run to be killed in the middle."""
    folder = tmp_path_factory.mktemp("large")
    noise = random_images(1, 1, 3, seed=33).images[0, 0]
    picture = Image.fromarray(noise.numpy()).resize((1600, 1600))
    for number in range(LARGE):
        turned = picture.rotate(25 * number)
        turned.save(folder / f"{number:02}.png", compress_level=1)
    return folder


@pytest.fixture(scope="module")
def whole(large: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> pyarrow.Table:
    """Their rows, by a run that nobody stops."""
    out = tmp_path_factory.mktemp("whole")
    assert run("bulk", large, "--model", model, "--part-size", 1, "--out", out)[0] == 0
    return table(out)


def start(*arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ecinn", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)


def wait_for_parts(out: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while len([*out.glob("part-*")]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_killed_run_continues_without_loss_or_repetition(
    model: Path, large: Path, whole: pyarrow.Table, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["bulk", large, "--model", model, "--part-size", 1, "--out"]
    process = start(*command, out)
    try:
        wait_for_parts(out, 2)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 2 <= len(before) < LARGE
    (out / ".part-00006.parquet.x1").write_bytes(b"unfinished")
    code, stdout, stderr = run(*command, out)
    assert code == 0, stderr
    assert f"{len(before)} of {LARGE} parts were there already" in stdout
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert not [*out.glob(".part*")]
    assert table(out).equals(whole)
    assert Counter(table(out)["key"].to_pylist()) == {f"{n:02}.png": 2 for n in range(LARGE)}
    summary = json.loads(run(*command, out, "--json")[1])
    assert (summary["rows"], summary["continued"]) == (2 * LARGE, LARGE)  # nothing is left to do


def test_a_block_over_which_three_workers_died_stops_a_ray_run(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    from ecinn.bulk.many_machines import Actor

    tmp_path.joinpath("o").mkdir()
    job = Job(str(model), str(tmp_path / "o"), "parquet", "image", "cpu", classifier=True)
    actor = Actor(job)
    for block in open_stream(pictures).blocks(6):
        batch = {"block": [json.dumps(asdict(block))]}
        for deaths in range(4):
            (said,) = actor(batch)["answer"]
            if deaths < 3:
                counts, _ = json.loads(said)
                assert counts["pictures"] == block.count
                assert len([*(tmp_path / "o").glob(".part*")]) == deaths
                for number in range(deaths + 1):
                    (tmp_path / "o" / f".part-{block.number:05}.try.{number}").touch()
            else:
                message, code = json.loads(said)
                assert (block.names[0] in message, code) == (True, 1)
        for path in (tmp_path / "o").glob(".part*"):
            path.unlink()


def ray_workers(ancestor: int) -> list[int]:
    """Return the processes of actors that this process has started, directly or not."""
    parents, actors = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            if b"ray::" in (line := (folder / "cmdline").read_bytes()) and b"(Actor)" in line:
                actors.append(int(folder.name))

    def descends(process: int) -> bool:
        return process == ancestor or (process in parents and descends(parents[process]))

    return [process for process in actors if descends(process)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_ray_gives_the_same_rows_even_if_a_worker_is_killed(
    model: Path, large: Path, whole: pyarrow.Table, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    command = ["bulk", large, "--model", model, "--part-size", 1, "--out"]
    process = start(*command, tmp_path / "ray", "--engine", "ray", "--workers", 2)
    try:
        wait_for_parts(tmp_path / "ray", 1)
        killed = ray_workers(process.pid)
        os.kill(killed[0], signal.SIGKILL)
        assert len([*(tmp_path / "ray").glob("part-*")]) < LARGE
        stdout, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, stderr
    assert f"Wrote {2 * LARGE} rows for {LARGE} pictures" in stdout
    assert not [*(tmp_path / "ray").glob(".part*")]
    assert table(tmp_path / "ray").equals(whole)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (["--target", "b"], "target"),
        (["--model", "mnist"], "model"),
        (["--confidence", "0.9"], "confidence"),
        (["--part-size", "5"], "part size"),
        (["--format", "webdataset"], "format"),
        ([], "input"),
    ],
)
def test_another_run_is_refused(
    changed: list[str], word: str, model: Path, pictures: Path, tmp_path: Path
) -> None:
    common = ["bulk", pictures, "--model", model, "--target", "0", "--part-size", 4]
    out = ["--out", tmp_path / "o"]
    assert run(*common, *out)[0] == 0
    (tmp_path / "o" / ".bulk.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    if not changed:
        (pictures / "a" / "new.png").write_bytes(b"")
    line = fails(*common, *changed, *out)
    assert f"another {word}" in line
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}


def test_a_full_disk_is_one_line_and_loses_nothing(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("bulk", pictures, "--model", model, "--part-size", 3, "--out")
    calls = iter(range(100))

    def full(_: int) -> None:
        if next(calls) == 3:  # the record, two parts, and then no space
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = fails(*command, tmp_path / "o", code=1)
    assert "No space left on device" in line
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert names == {"_bulk.json", ".bulk.lock", "part-00000.parquet", "part-00001.parquet"}
    assert run(*command, tmp_path / "o")[0] == 0
    assert run(*command, tmp_path / "whole")[0] == 0
    assert table(tmp_path / "o").equals(table(tmp_path / "whole"))


def test_a_student_without_its_classifier_is_named_as_such(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "student"
    folder.mkdir()
    shutil.copy(model, folder / "model.safetensors")
    (folder / "classifier.toml").write_text('file = "gone.pt"\n')
    assert "is gone" in fails("bulk", pictures, "--model", folder, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    code, _, stderr = run(
        "bulk", pictures, "--model", folder, "--out", tmp_path / "o", "--no-classifier"
    )
    assert code == 0
    assert "explaining the student only" in stderr


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
@pytest.mark.parametrize("damage", ["empty", "cut", "last row"])
def test_damaged_parts_are_computed_again(
    damage: str, kind: str, model: Path, pictures: Path, tmp_path: Path
) -> None:
    command = ("bulk", pictures, "--model", model, "--target", "a,b", "--part-size", 3,
               "--format", kind, "--out", tmp_path / "o")  # fmt: skip
    code, stdout, _ = run(*command)
    assert (code, "Wrote 22 rows for 11 pictures" in stdout) == (0, True)
    parts = sorted((tmp_path / "o").glob("part-*"))
    before = [path.read_bytes() for path in parts]
    for content, path in zip(before[1:3], parts[1:3], strict=True):
        end = {"empty": 0, "cut": len(content) // 2, "last row": len(content) - 20}[damage]
        if (damage, kind) == ("last row", "webdataset"):
            with tarfile.open(path) as archive:
                *_, last = archive
            end = last.offset  # where a tar archive may be cut without anything being amiss
        path.write_bytes(content[:end])
    code, stdout, stderr = run(*command)
    assert code == 0
    assert stderr.count("damaged parts are computed again: 2") == 1
    assert "2 of 4 parts were there already" in stdout
    code, *said = run(*command)
    assert code == 0
    assert "4 of 4 parts were there already" in said[0]
    assert "damaged" not in said[1]
    assert [path.read_bytes() for path in parts] == before


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_a_repeated_run_counts_the_rows_that_are_there(
    kind: str, model: Path, pictures: Path, tmp_path: Path
) -> None:
    command = ("bulk", pictures, "--model", model, "--target", "a,b", "--part-size", 3,
               "--format", kind, "--out", tmp_path / "o")  # fmt: skip
    first = json.loads(run(*command, "--json")[1])
    assert first["errors"] > 2  # one picture is damaged, others are predicted as a or b
    (tmp_path / "o" / f"part-00001.{'tar' if kind == 'webdataset' else kind}").unlink()
    for continued in (3, 4):
        assert json.loads(run(*command, "--json")[1]) == first | {"continued": continued}
    code, stdout, _ = run(*command)
    assert code == 0
    assert f"22 rows for 11 pictures in {tmp_path / 'o'}" in stdout
    assert f"Rows without a counterfactual: {first['errors']}" in stdout


def test_targets_and_sizes_may_be_arrays_tensors_and_text_with_spaces(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    def explain(target: object, size: object, out: str) -> Summary:
        return ecinn.explain_dataset(
            pictures, tmp_path / out, model=model, target=target, part_size=size
        )

    for size, targets in enumerate(
        (
            (1, "b", " b ", " 1", np.int64(1), np.array(1), torch.tensor(1)),
            ("b,c", "b, 2", [1, 2], np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), "c"]),
            ("all", " all"),
        ),
        4,
    ):
        first = explain(targets[0], size, str(size))
        again = [explain(target, np.int64(size), str(size)) for target in targets[1:]]
        assert again == [replace(first, continued=first.parts)] * len(again)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "dask"}, "one of local, ray"),
        ({"format": "csv"}, "one of parquet, webdataset"),
        ({"workers": 3}, "--engine ray"),
        ({"address": "foo:1"}, "--engine ray"),
        ({"engine": "ray", "workers": 0}, "1 or more, not 0"),
        ({"correct": True, "check": False}, "needs the check"),
        ({"part_size": -1}, "1 or more, not -1"),
        ({"part_size": 2.5}, "1 or more, not 2.5"),
        ({"part_size": "3"}, "1 or more, not '3'"),
        ({"target": np.float64(1.5)}, "a target is a class"),
        ({"target": np.array([0.5, 1.0])}, "whole numbers"),
        ({"target": np.array([[0, 1], [1, 2]])}, "targets"),
        ({"model": small_model()}, "not an object of type Model"),
        ({"source": np.zeros((2, 8, 8), np.uint8)}, "not an object of type ndarray"),
        ({"out": None}, "not an object of type NoneType"),
    ],
)
def test_wrong_arguments_are_one_line(
    options: dict[str, object], words: str, model: Path, pictures: Path, tmp_path: Path
) -> None:
    explain = inspect.unwrap(ecinn.explain_dataset)  # tests check types, users may not
    with pytest.raises(ecinn.InputError) as error:
        explain(**{"source": pictures, "out": tmp_path / "o", "model": model, **options})
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["source", "out", "model"])
def test_folders_that_may_not_be_entered_are_one_line(
    name: str, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refuse(path: object, *arguments: object, **options: object) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    paths = {"source": pictures, "out": tmp_path / "o", "model": model}
    paths[name] = tmp_path / "closed" / "x"
    with pytest.raises(ecinn.InputError, match=f"{paths[name]}: "):
        ecinn.explain_dataset(**paths)


@pytest.mark.parametrize("module", ["pyarrow", "ray"])
def test_a_missing_package_is_one_line(
    module: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "ecinn.bulk.many_machines", raising=False)
    engine = ["--engine", "ray"] if module == "ray" else []
    extra = {"pyarrow": "bulk", "ray": "ray"}[module]
    assert f"'ecinn[{extra}]'" in fails("bulk", pictures, "--out", tmp_path / "o", *engine)
    assert not (tmp_path / "o").exists()


def problems(tmp_path: Path, pictures: Path) -> dict[str, list[object]]:
    busy, file = tmp_path / "busy", tmp_path / "file"
    busy.mkdir()
    (busy / "thesis.txt").write_text("mine")
    file.write_text("mine")
    shard = write_shard(tmp_path / "cut.tar", [b"x" * 9000])
    shard.write_bytes(shard.read_bytes()[:5000])
    numbers = write_table(tmp_path / "other.parquet", [b"x"], "picture")
    np.save(tmp_path / "wide.npy", np.zeros((3, 5, 9), np.uint8))
    out = ["--out", tmp_path / "o"]
    return {
        "images are of shape": [tmp_path / "wide.npy", *out],
        "thesis.txt": [pictures, "--out", busy],
        "is a file": [pictures, "--out", file],
        "lies inside": [pictures, "--out", pictures / "o"],
        "there is no": [tmp_path / "gone", *out],
        "not a kind of data": [file, *out],
        "cut.tar is damaged": [shard, *out],
        "no column 'image'": [numbers, *out],
        "no class is called": [pictures, "--target", "8,x", *out],
        "omit --column": [pictures, "--column", "image", *out],
        "out of range": [pictures, "--target", "11", *out],
        "above 0 and below 1": [pictures, "--confidence", "7", *out],
        "--no-check": [pictures, "--correct", "--no-check", *out],
        "--engine ray": [pictures, "--workers", "2", *out],
        "cannot connect to a Ray cluster": [
            pictures,
            "--engine",
            "ray",
            "--address",
            "127.0.0.1:9",
            *out,
        ],
    }


def test_problems_are_one_line_and_write_nothing(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    for words, arguments in problems(tmp_path, pictures).items():
        before = {*tmp_path.rglob("*")}
        line = fails("bulk", *arguments, "--model", model)
        assert words in line
        left = {path.name for path in {*tmp_path.rglob("*")} - before}
        assert left <= ({"o", "_bulk.json", ".bulk.lock"} if "Ray" in words else set())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_without_ray_is_refused_before_ray_waits_for_it(
    answer: bytes, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ecinn.bulk import many_machines

    monkeypatch.setattr(many_machines, "PATIENCE", 0.5)
    monkeypatch.setattr(many_machines.ray, "init", lambda **_: pytest.fail("it would wait"))
    command = ["bulk", pictures, "--model", model, "--out", tmp_path / "o", "--engine", "ray"]
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:

        def reply() -> None:
            with server.accept()[0] as client:
                client.sendall(answer)
                client.recv(99)

        if answer:
            pool.submit(reply)
        address = "{}:{}".format(*server.getsockname())
        assert address in fails(*command, "--address", address)


def test_names_that_are_not_utf_8_are_escaped(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    good, bad = (tmp_path / "in" / os.fsdecode(name) for name in (b"caf\xe9.png", b"th\xe9.png"))
    good.write_bytes(png(random_images(1, 1, 3, seed=34).images[0]))
    bad.write_bytes(b"no picture")
    for kind in ("parquet", "webdataset"):
        out = tmp_path / kind
        assert run("bulk", good.parent, "--model", model, "--out", out, "--format", kind)[0] == 0
    rows = table(tmp_path / "parquet").to_pylist()
    assert [row["key"] for row in rows] == [r"caf\xe9.png", r"caf\xe9.png", r"th\xe9.png"]
    assert r"th\xe9.png" in rows[2]["error"]


def test_two_runs_do_not_write_to_one_folder(pictures: Path, model: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "o").mkdir()
    with (tmp_path / "o" / ".bulk.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = fails("bulk", pictures, "--model", model, "--out", tmp_path / "o")
    assert "another run" in line
    assert run("bulk", pictures, "--model", model, "--out", tmp_path / "o")[0] == 0
