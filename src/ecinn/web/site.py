"""The page as static files that run the network in the visitor's browser."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ecinn.drawing import pictures
from ecinn.drawing.pictures import png_bytes
from ecinn.errors import InputError
from ecinn.export.onnx_files import describe, onnx_files
from ecinn.export.shared_weights import share_weights
from ecinn.files import atomic_folder, output_folder
from ecinn.web.catalogue import Catalogue, ServedModel, load_catalogue
from ecinn.web.npm import npm_files

MODELS = ("mnist", "mnist-finetuned", "fakemnist")
SAMPLES = 1000
"""Test images of each model: the first ones, so that links to them open the same everywhere."""
ACROSS = 40
"""Test images side by side in their file."""
RUNTIME, RUNTIME_VERSION = "onnxruntime-web", "1.30.0"
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""For WebAssembly on the CPU; scripts are renamed, as some hosts do not know .mjs."""
SITE = "site.json"
"""Lists the files of a site, by which the next build recognises it."""
PREVIEW = "preview.png"
PREVIEW_SIZE = (1200, 630)
"""Width and height of link previews (1.91:1)."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; worker-src 'self'; form-action 'none'; "
    "base-uri 'none'"
)
TITLE = "Why this, and not that?"
PROMISE = (
    "Everything runs in your browser: no picture leaves your machine. Faces and models of your "
    "own need <code>ecinn serve</code>."
)
_PAGE, _BROWSER = (Path(__file__).parent / name for name in ("page", "browser"))
_FETCH = f", or unpack {RUNTIME} {RUNTIME_VERSION} yourself and name its folder with --ort DIR"


def build_site(
    folder: Path,
    models: Sequence[str] = MODELS,
    *,
    ort: Path | None = None,
    url: str | None = None,
) -> dict[str, int]:
    """Write the site, in place of an earlier one; return the size of every file.

    Args:
        models: names or paths of models of digits or of digits labelled by dots.
        ort: an unpacked npm package of onnxruntime-web; None fetches it with npm.
        url: the address of the site, for link previews, which need a complete one.
    """
    output_folder(folder)
    _check_folder(folder)
    if url is not None and not re.fullmatch(r"https?://[^\s\"'<>]+", url):
        raise InputError(
            f"--url is the address of the site, such as https://example.org/, not {url}"
        )
    runtime = _runtime(ort)
    catalogue = _catalogue(models)
    files = _page(None if url is None else url.rstrip("/") + "/")
    for name in RUNTIME_FILES:
        files[f"static/ort/{name.replace('.mjs', '.js')}"] = runtime[name]
    described = []
    for served in catalogue.values():
        part = _model_files(served)
        files |= part
        size = len(runtime[RUNTIME_FILES[-1]]) + sum(map(len, part.values()))
        assert served.samples is not None
        labels = served.samples.labels.tolist()
        described.append({**served.describe(), "labels": labels, "megabytes": size / 1e6})
    files["models/models.json"] = _json({"models": described})
    files[PREVIEW] = png_bytes(preview(next(iter(catalogue.values()))))
    files["sw.js"] = _service_worker(files)
    files[SITE] = _json({"format": "ecinn-site-1", "files": sorted([*files, SITE])})
    atomic_folder(folder, files, replace=True)
    return {name: len(content) for name, content in files.items()}


def _check_folder(folder: Path) -> None:
    """Refuse a folder with files that no site has."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    try:
        ours = set(json.loads((folder / SITE).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if foreign := sorted(there - ours):
        raise InputError(
            f"{folder} holds files that are not of a site, such as {foreign[0]}: "
            "give a new folder, or remove them first"
        )


def _catalogue(models: Sequence[str]) -> Catalogue:
    catalogue = load_catalogue(models, ask_classifiers=False)
    for served in catalogue.values():
        if served.kind not in ("digits", "dots"):
            raise InputError(
                f"{served.name} needs `ecinn serve`: a site has digits and digits labelled by dots"
            )
    return {name: _first(served) for name, served in catalogue.items()}


def _first(served: ServedModel) -> ServedModel:
    assert served.samples is not None
    return dataclasses.replace(served, samples=served.samples.first(SAMPLES))


def _runtime(package: Path | None) -> Mapping[str, bytes]:
    """Return the files of onnxruntime-web: of this package, or from npm."""
    if package is None:
        files = [f"dist/{name}" for name in RUNTIME_FILES]
        fetched = npm_files(RUNTIME, RUNTIME_VERSION, files, otherwise=_FETCH)
        return {name.removeprefix("dist/"): content for name, content in fetched.items()}
    folder = package / "dist" if (package / "dist").is_dir() else package
    try:
        return {name: (folder / name).read_bytes() for name in RUNTIME_FILES}
    except OSError as error:
        raise InputError(
            f"{package} has no {error.filename and Path(error.filename).name}: name the folder of "
            f"an unpacked {RUNTIME} {RUNTIME_VERSION}"
        ) from error


def _page(url: str | None) -> dict[str, bytes]:
    """Return the page's own files, with requests answered in the browser."""
    files = {
        f"static/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for folder in (_PAGE, _BROWSER)
        for path in folder.rglob("*")
        if path.is_file()
    }
    del files["static/sw.js"]
    files["index.html"] = _index(files.pop("static/index.html").decode(), url).encode()
    return files


def _index(page: str, url: str | None) -> str:
    """Use relative addresses, and say what is different without a service."""
    description = re.search(r'<meta name="description" content="([^"]*)">', page)
    assert description is not None
    head = {
        "og:type": "website",
        "og:title": TITLE,
        "og:description": html.unescape(description[1]),
        "og:image": f"{url or ''}{PREVIEW}",
        "og:image:width": PREVIEW_SIZE[0],
        "og:image:height": PREVIEW_SIZE[1],
        "og:image:alt": "A handwritten 3 that becomes an 8 in five steps.",
    } | ({"og:url": url} if url else {})
    tags = [f'<meta property="{key}" content="{html.escape(str(v))}">' for key, v in head.items()]
    tags.append('<meta name="twitter:card" content="summary_large_image">')
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
    changes = (
        (r'(<meta charset="utf-8">)', rf"\1\n  {policy}"),
        (r"(?=\n  <title>)", "".join(f"\n  {tag}" for tag in tags)),
        (
            r"<noscript>.*?</noscript>",
            '<noscript><p class="notice">This page needs JavaScript.</p></noscript>',
        ),
        # Before all other modules, so that WebAssembly is loaded while the page is.
        (
            r'(?=\n  <script type="module")',
            '\n  <script type="module" src="static/service.js"></script>',
        ),
        (r'(<p class="colophon"[^>]*>).*?</p>', rf"\1{PROMISE}</p>"),
    )
    for pattern, replacement in changes:
        page, count = re.subn(pattern, replacement, page, flags=re.DOTALL)
        assert count == 1, f"the page has {count} places like {pattern}"
    return re.sub(r'((?:href|src)=")/?static/', r"\1static/", page)


def _model_files(served: ServedModel) -> dict[str, bytes]:
    """Return f and f⁻¹, their weights, the class means, and the test images of a model."""
    model = served.model
    files = onnx_files(model, ("encode", "decode"))
    shared = share_weights({name: file.content for name, file in files.items()})
    about = describe(model) | {
        "tau": float(model.tau),
        "mu": _base64(model.mu),
        "mu_bar": _base64(model.mu_bar),
        "weights": shared.shapes,
    }
    assert served.samples is not None
    parts = {f"{name}.onnx": content for name, content in shared.graphs.items()}
    parts |= {"weights.bin": shared.content, "model.json": _json(about)}
    parts |= {"samples.png": _tiles(served.samples.images)}
    return {f"models/{served.name}/{name}": content for name, content in parts.items()}


def _tiles(images: Tensor) -> bytes:
    """Draw all images into one PNG, row by row."""
    count, _, height, width = images.shape
    across = min(ACROSS, count)
    rows = -(-count // across)
    filled = torch.zeros(rows * across, height, width, dtype=torch.uint8)
    filled[:count] = images[:, 0]
    grid = filled.reshape(rows, across, height, width).transpose(1, 2)
    return png_bytes(Image.fromarray(grid.reshape(rows * height, across * width).numpy()))


def preview(served: ServedModel) -> Image.Image:
    """Draw the picture of link previews: a digit that the model turns into another."""
    model, samples = served.model, served.samples
    assert samples is not None
    digit = samples.images[min(90, len(samples) - 1)][None]
    p = int(model.predict(digit).argmax())
    target = 8 if p == 3 else (p + 1) % len(model.class_names)
    e = model.explain(digit, target, confidence="alpha_1", path=5)
    assert e.path is not None
    width, height = PREVIEW_SIZE
    tile, gap, top = 196, 20, 250
    canvas = Image.new("RGB", PREVIEW_SIZE, pictures.PAPER)
    pen = ImageDraw.Draw(canvas)
    left = (width - 5 * tile - 4 * gap) // 2
    names = [_with_article(model.class_names[label]) for label in (p, target)]
    question = f"Why is this {names[0]} and not {names[1]}?"
    pen.text((left, 88), question, pictures.INK, pictures.font(58))
    pen.text(
        (left, 172),
        "Counterfactuals from an invertible network",
        pictures.MUTED,
        pictures.font(30),
    )
    shares = e.path.verdict[0, 0, :, target].tolist()
    for step, (frame, share) in enumerate(zip(e.path.images[0, 0], shares, strict=True)):
        x = left + step * (tile + gap)
        stored = np.clip(np.floor(256 * frame.numpy()), 0, 255).astype(np.uint8)
        array = np.repeat(stored.transpose(1, 2, 0), 3, axis=2)
        canvas.paste(pictures.enlarge(array, tile), (x, top))
        words = f"{model.class_names[target]}: {pictures.percent(share)}"
        pen.text(
            (x + tile // 2, top + tile + 14), words, pictures.MUTED, pictures.font(24), anchor="ma"
        )
    pen.text(
        (left, height - 76), "ECINN · draw a digit and try it", pictures.INK, pictures.font(30)
    )
    return canvas


def _with_article(name: str) -> str:
    return f"{'an' if name.startswith('8') else 'a'} {name}"


def _service_worker(files: Mapping[str, bytes]) -> bytes:
    """Return the script that keeps all files; its version changes with their contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])} ".encode() + files[name])
    # Link previews are for other programs.
    kept = ["./", *sorted(name for name in files if name not in ("index.html", PREVIEW))]
    script = (_BROWSER / "sw.js").read_text()
    script = script.replace("{{ version }}", digest.hexdigest()[:16])
    return script.replace("{{ files }}", json.dumps(kept, indent=2)).encode()


def _base64(values: Tensor) -> str:
    little: np.ndarray = values.detach().cpu().numpy().astype("<f4")
    return base64.b64encode(little.tobytes()).decode()


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
