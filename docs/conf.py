"""How Sphinx makes a site of README.md, CHANGELOG.md and docs/: `make docs`.

The folder of the sources is the repository's, so that a link means the same here and on GitHub.
Warnings are errors: a link, an anchor or a page that is in no menu, and whatever is below.
"""

import importlib
import os
import pathlib
import shutil
from collections.abc import Iterable
from importlib.metadata import version as version_of
from typing import Any

import typer
from sphinx.ext.autodoc.mock import mock
from typer.cli import get_docs_for_click

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

from forebay.service.cli import app as command  # reads the variables above

FOLDER = pathlib.Path(__file__).resolve().parent
MENU = {
    "Guide": [
        *("docs/README", "docs/install", "docs/guarantees", "docs/limitations", "docs/reading"),
        *("docs/ordered", "docs/mixtures", "docs/executors", "docs/files", "docs/sources"),
        "docs/tfds",
        *("docs/materialize", "docs/operations", "docs/dashboard", "docs/journal", "SECURITY"),
        *("docs/performance", "deploy/README", "deploy/kubernetes/README"),
        "deploy/kubernetes/gke/README",
    ],
    "Frameworks": [
        *("docs/frameworks/keras", "docs/frameworks/tf_distribute"),
        *("docs/frameworks/pytorch", "docs/frameworks/jax"),
    ],
    "From elsewhere": ["docs/migrating", "docs/compatibility"],
    "Reference": [
        *("docs/api/service", "docs/api/frameworks", "docs/api/storage", "docs/api/journal"),
        *("docs/api/formats", "docs/api/cli", "CHANGELOG"),
    ],
    "Development": [
        *("docs/architecture", "docs/architecture/decision", "docs/architecture/element"),
        *("docs/architecture/ordered", "docs/architecture/death"),
        *("docs/formats", "docs/storages", "docs/glossary", "docs/chaos"),
        "docs/decisions/README",
    ],
}
PUBLIC = ("service", "service.formats", "torch", "jax", "keras", "storage", "journal")

project = "Forebay"
version = release = version_of("forebay")
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "SECURITY.md", "deploy/**.md", "docs/**.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
suppress_warnings = ["misc.highlighting_failure"]  # parts of programs, with "…"
myst_heading_anchors = 4
default_role = "code"
autodoc_default_options = {"members": True, "imported-members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["torch", "jax"]
html_theme = "furo"
html_title = "Forebay"
html_copy_source = False
html_show_sourcelink = False


def add_to_page(_: Any, page: str, source: list[str]) -> None:
    """The menus, which GitHub doesn't show, and the commands."""
    if page == root_doc:
        source[0] += "".join(_toctree(pages, caption) for caption, pages in MENU.items())
    elif page == "docs/decisions/README":
        topics = sorted(FOLDER.glob("decisions/[a-z]*.md"))
        source[0] += _toctree(f"docs/decisions/{topic.stem}" for topic in topics)
    elif page == "docs/api/cli":
        click = typer.main.get_command(command)
        context = typer.Context(click, info_name="forebay")
        source[0] = get_docs_for_click(obj=click, ctx=context, name="forebay", title="Commands")


def _toctree(pages: Iterable[str], caption: str = "") -> str:
    options = [f":caption: {caption}"] * bool(caption) + [":hidden:", ""]
    return "\n\n```{toctree}\n" + "\n".join([*options, *(f"/{page}" for page in pages)]) + "\n```\n"


def check_names(_: Any, env: Any) -> None:
    """Each public name is in the reference."""
    found = {name.rpartition(".")[2] for name, *_ in env.get_domain("py").get_objects()}
    for package in PUBLIC:
        with mock(autodoc_mock_imports):
            public = importlib.import_module(f"forebay.{package}").__all__
        if missing := {*public} - found:
            raise ValueError(f"forebay.{package}: docs/api/ lacks {', '.join(sorted(missing))}")


def begin_with_readme(app: Any, failure: Exception | None) -> None:
    """A server of files shows index.html first."""
    if failure is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", add_to_page)
    app.connect("env-check-consistency", check_names)
    app.connect("build-finished", begin_with_readme)
