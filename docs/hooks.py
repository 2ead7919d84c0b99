"""Add pages to the site whose source is not in docs/: root files, notebook, command reference."""

import json
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from ecinn.cli.app import PANELS, app

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
    files.append(File.generated(config, "reference/cli.md", content=command_page()))
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


def notebook_page(notebook: dict[str, Any]) -> str:
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


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"].split())
        return f'<img src="data:image/png;base64,{image}" alt="Output of the cell above">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"


def command_page() -> str:
    """List every command with its arguments and options, from the command line itself."""
    import ecinn.cli  # noqa: F401  registers the commands

    commands = typer.main.get_command(app).commands
    parts = [
        "# Command line",
        "Results go to stdout; progress, notes and errors to stderr. Exit codes: 0 success,"
        " 1 internal failure, 2 unusable input, 130 interrupted."
        " [Environment variables](environment.md) change defaults.",
    ]
    for panel, names in PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            parts += _command(f"ecinn {name}", commands[name])
    return "\n\n".join(parts)


def _command(name: str, command: Any) -> list[str]:  # noqa: ANN401
    parts = [f"### {name}", command.help or ""]
    rows = [
        f"| {_option_name(option)} | {_cell(option.help)} | {_default(option)} |"
        for option in command.params
    ]
    if rows:
        parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
    for child, subcommand in getattr(command, "commands", {}).items():
        parts += _command(f"{name} {child}", subcommand)
    return parts


def _option_name(option: Any) -> str:  # noqa: ANN401
    if option.param_type_name == "argument":
        return f"`{option.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:  # noqa: ANN401
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return _cell(option.show_default)
    value = option.default
    if callable(value) or value in (None, (), [], False):
        return ""
    return "on" if value is True else f"`{_cell(str(value))}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
