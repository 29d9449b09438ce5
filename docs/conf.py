"""How Sphinx makes the site: `make docs`. Python is read from the built package, C++ from the
headers by Doxygen, the command from its own --help. Nothing comes from the network."""

import os
import re
import subprocess
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(os.environ.get("TENSORFERRY_BUILD_DIR", ROOT / "build/release")) / "bin/tensorferry"

project = "tensorferry"
version_text = (ROOT / "include/tensorferry/version.h").read_text()
release = version = ".".join(
    re.findall(r"define TENSORFERRY_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", version_text)
)

extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
source_suffix = {".md": "markdown"}
nitpicky = True
# Names from elsewhere: there is no network to look them up in.
nitpick_ignore_regex = [
    ("py:.*", r"(argparse|numpy|os|torch|collections|typing)\..*"),
    ("py:.*", "Literal|Iterable|Callable|Generator"),
    ("py:class", "Model"),  # any torch.nn.Module
    ("py:class", "Progress"),  # True, or a function of (done bytes, total bytes)
    ("py:class", "MapLocation|ModuleType"),  # as in torch.load and torch.save
    ("py:class", "CheckpointPath|Rename"),  # one path or several; a mapping or a function of names
    ("py:class", "Portion"),  # what one holder has of a MemoryBudget
    ("py:class", "Format"),  # "torch" or "safetensors"
    ("py:class", "_?Priority"),  # "urgent", "normal" or "background"
    ("py:class", "Verify"),  # True, False or "if_present"
    ("py:class", "WhenBusy"),  # "queue" or "refuse"
    ("py:class", r".*\.Accelerator"),  # of accelerate
    ("py:class", "AnyPath"),  # a str or an os.PathLike
    ("py:class", "Stateful"),  # whatever has state_dict() and load_state_dict()
    ("py:class", r".*\.(SnapshotPart|SavedPart)"),  # between an optimizer and a snapshot
    ("py:class", r".*\.SavedCache"),  # what NvmeCache.load() hands on
    ("cpp:identifier", r"(std|at|torch|Clock)(::.*)?|tensorferry"),
]

myst_heading_anchors = 3
default_role = "code"  # `this` in a docstring is code, as it is in Markdown

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
# The source of the extension, as far as the order of its members goes.
ModuleAnalyzer.cache["module", "tensorferry._core"] = ModuleAnalyzer.for_file(
    ROOT / "python/tensorferry/_core.pyi", "tensorferry._core"
)
autodoc_default_options = {"members": True}

breathe_default_project = "tensorferry"

html_theme = "furo"
html_title = f"tensorferry {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
highlight_language = "text"


def read_headers(app):
    """Runs Doxygen and tells Breathe where the result is."""
    folder = Path(app.doctreedir).parent / "cpp"
    folder.mkdir(parents=True, exist_ok=True)
    settings = (ROOT / "docs/Doxyfile").read_text() + f"OUTPUT_DIRECTORY = {folder}\n"
    subprocess.run(["doxygen", "-"], input=settings, text=True, check=True, cwd=ROOT)
    app.config.breathe_projects = {"tensorferry": str(folder / "xml")}


def fill_in_help(app, name, text):
    """A line `help: bench` becomes what `tensorferry bench --help` prints."""

    def printed(match):
        return subprocess.run(
            [COMMAND, *match.group(1).split(), "--help"], capture_output=True, text=True, check=True
        ).stdout.strip()

    text[0] = re.sub(r"^help:(.*)$", printed, text[0], flags=re.MULTILINE)


def plain_signature(app, what, name, thing, options, signature, returned):
    """Without `self`, and without names that only the stub of the extension knows."""
    if signature:
        signature = re.sub(r"^\(self(, )?", "(", signature)
        signature = signature.replace("_File", "str | File | int").replace("_Path", "str")
    return signature, returned


def plain_docstring(app, what, name, thing, options, lines):
    """Where a property of the extension says nothing, nanobind gives its signature."""
    lines[:] = [re.sub(r"^\(self\) -> (.*)", r":type: \1", line) for line in lines]


def setup(app):
    app.connect("builder-inited", read_headers)
    app.connect("source-read", fill_in_help)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", plain_docstring)
