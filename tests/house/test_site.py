"""The site that `make docs` makes: it builds without a warning, its links lead somewhere, it needs
nothing from outside, and its reference has every public name."""

import functools
import html
import html.parser
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest
from commands import COMMANDS
from house import ROOT, run

sphinx_inventory = pytest.importorskip("sphinx.util.inventory", reason="no Sphinx: make docs")


@pytest.fixture(scope="session")
def site(build_dir, tmp_path_factory):
    if not shutil.which("doxygen"):
        pytest.skip("no doxygen")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-b",
            "html",
            "-d",
            place / "work/doctrees",
            ROOT / "docs",
            place / "html",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=os.environ
        | {"PYTHONPATH": str(build_dir / "python"), "TENSORFERRY_BUILD_DIR": str(build_dir)},
    )
    assert done.returncode == 0, done.stdout
    return place / "html"


class Page(html.parser.HTMLParser):
    """What a page links to, what it loads, and the places in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.places = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, pairs):
        facts = dict(pairs)
        self.places.update(filter(None, [facts.get("id")]))
        if tag == "a" and "href" in facts:
            self.links.append(facts["href"])
        elif tag != "a":
            self.loads += [
                facts[name]
                for name in ("src", "href", "data", "poster", "srcset")
                if facts.get(name)
            ]


@functools.cache
def page_of(path):
    return Page(path.read_text())


def is_outside(address):
    return bool(re.match(r"(?:[a-z]+:)?//", address.strip()))


def test_internal_links_and_anchors_lead_somewhere(site):
    broken = []
    for path in site.rglob("*.html"):
        for link in page_of(path).links + page_of(path).loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target.exists() and (
                not parts.fragment
                or target.suffix != ".html"
                or unquote(parts.fragment) in page_of(target).places
            )
            if not known:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)


def test_nothing_is_loaded_from_outside(site):
    found = [
        f"{path.relative_to(site)}: {address}"
        for path in site.rglob("*.html")
        for address in page_of(path).loads
        if is_outside(address)
    ]
    for path in site.rglob("*.css"):
        addresses = re.findall(
            r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", path.read_text()
        )
        found += [
            f"{path.relative_to(site)}: {address}"
            for pair in addresses
            for address in pair
            if is_outside(address)
        ]
    for path in site.rglob("*.svg"):
        found += [
            f"{path.relative_to(site)}: {address}"
            for address in re.findall(r"(?:href|src)=\"([^\"#]+)", path.read_text())
            if is_outside(address)
        ]
    assert not found, "\n".join(found)


@pytest.fixture(scope="session")
def names(site):
    """All that the reference describes: `tensorferry.Handle.read`, `tensorferry::Handle::read`."""
    inventory = sphinx_inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {
        name
        for domain, found in inventory.data.items()
        if domain.startswith(("py:", "cpp:", "c:"))
        for name in found
    }


def test_the_reference_has_every_public_name_of_python(names):
    tensorferry = pytest.importorskip("tensorferry")
    public = {f"tensorferry.{name}" for name in tensorferry.__all__}
    for name in tensorferry.__all__:
        thing = getattr(tensorferry, name)
        if isinstance(thing, type) and not issubclass(thing, Exception):
            public |= {
                f"tensorferry.{name}.{member}"
                for member, value in vars(thing).items()
                if not member.startswith("_") and getattr(value, "__doc__", None)
            }
    for module in ("aio", "deepspeed", "offload", "optim", "report", "sweep"):
        place = ROOT / "python/tensorferry" / module
        source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
        listed = re.search(r"^__all__ = \[(.*?)\]", source, re.MULTILINE | re.DOTALL).group(1)
        prefix = "tensorferry." if module == "aio" else f"tensorferry.{module}."
        public |= {prefix + name for name in re.findall(r'"(\w+)"', listed)}
    assert not sorted(public - names)


def public_cpp_names():
    for path in sorted((ROOT / "include/tensorferry").glob("*.h")):
        done = subprocess.run(
            ["awk", "-f", ROOT / "docs/cpp_comments.awk", path],
            capture_output=True,
            text=True,
            check=True,
        )
        code = re.sub(
            r"namespace detail \{.*?namespace detail$",
            "",
            done.stdout,
            flags=re.DOTALL | re.MULTILINE,
        )
        code = re.sub(r"//.*", "", code)
        yield from re.findall(
            r"^(?:enum )?(?:class|struct) "
            r"(?:\[\[nodiscard\]\] )?(?:TENSORFERRY_EXPORT )?(\w+)",
            code,
            re.MULTILINE,
        )
        yield from re.findall(
            r"^(?:\[\[|inline|TENSORFERRY_EXPORT)[^(;{]*?(\w+)\(", code, re.MULTILINE
        )


def test_the_reference_has_every_public_name_of_cpp(names):
    public = set(public_cpp_names())
    assert {
        "Handle",
        "Operation",
        "Durability",
        "aio_read",
        "copy",
        "bytes_of",
        "deepspeed_py_aio_read",
    } <= public
    described = {name.rpartition("::")[2] for name in names if "." not in name}
    assert not sorted(public - described)


def test_the_reference_has_the_comments_behind_members(site):
    """Those above a declaration are Doxygen's daily bread; these are easily lost."""
    text = plain(re.sub(r"<[^>]+>", "", (site / "reference/cpp.html").read_text()))
    comments = [
        line.partition("; ")[2].strip(" /")
        for path in (ROOT / "include/tensorferry").glob("*.h")
        for line in path.read_text().splitlines()
        if re.search(r"^ +[^/ ].*; +// ", line)
    ]
    assert len(comments) > 40
    assert not [comment for comment in comments if plain(comment) not in text]


def plain(text):
    """Words alone: quotes and dashes are set differently on a page."""
    return " ".join(re.findall(r"[a-z0-9_]+", html.unescape(text).lower()))


def test_the_reference_has_every_flag_of_the_command(site, build_dir):
    text = re.sub(r"<[^>]+>", "", (site / "reference/command.html").read_text())
    listed = run(build_dir / "bin/tensorferry", "--help")
    assert set(re.findall(r"^  ([a-z]+)  ", listed, re.MULTILINE)) == set(COMMANDS)
    for command in COMMANDS:
        said = run(build_dir / "bin/tensorferry", command, "--help")
        for flag in re.findall(r"^  (?:-\w,)?(--[\w-]+)", said, re.MULTILINE):
            assert flag in text, f"{command} {flag}"


def test_every_page_is_in_the_site(site):
    for path in (ROOT / "docs").rglob("*.md"):
        assert (site / path.relative_to(ROOT / "docs").with_suffix(".html")).exists(), path
