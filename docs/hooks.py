"""Add pages to the site whose source lies outside docs/: the root's Markdown and the notebook."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK = ROOT / "notebooks" / "ecinn.ipynb"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\(docs/(?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that mkdocs.yml's navigation names but docs/ does not hold."""
    for source, page in ROOT_PAGES.items():
        text = root_page((ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    notebook = json.loads(NOTEBOOK.read_text())
    files.append(File.generated(config, "notebook.md", content=notebook_page(notebook)))
    files.append(File.generated(config, NOTEBOOK.name, content=NOTEBOOK.read_text()))
    return files


def root_page(text: str) -> str:
    """Rewrite links of a file in the root for a page of the site."""
    return LINK.sub(_link, IMAGE.sub(r"![\g<text>](\g<target>)", text))


def _link(match: re.Match[str]) -> str:
    """Point to the page; keep only the text where the target is not part of the site."""
    text, target = match["text"], match["target"]
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, _, anchor = target.partition("#")
    if not (ROOT / path).exists():
        raise PluginError(f"broken link: no file {path!r} in the project")
    pages = {**ROOT_PAGES, f"notebooks/{NOTEBOOK.name}": "notebook.md"}
    page = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
    return f"[{text}]({page}{'#' * bool(anchor)}{anchor})" if page else text


def notebook_page(notebook: dict) -> str:
    """Render a notebook's cells and outputs as Markdown."""
    parts = [f"[Download this notebook]({NOTEBOOK.name}); `make notebook` runs it."]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_output(output) for output in cell["outputs"]]
    title, *rest = parts[1].splitlines()
    return "\n\n".join([title, parts[0], "\n".join(rest), *parts[2:]])


def _output(output: dict) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"].split())
        return f'<img src="data:image/png;base64,{image}" alt="Output of the cell above">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"
