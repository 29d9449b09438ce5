"""The whole page: its head, the runs side by side, each run with its machine and settings."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from plotly.offline import get_plotlyjs

from . import bench, compare, plan, sweep, trace, tune
from .compare import Run
from .page import (
    Json,
    Page,
    digits,
    escape,
    facts,
    heading,
    number,
    paragraph,
    plural,
    section,
    size,
    table,
)


class Maker(Protocol):
    """The module that makes the sections of a command."""

    def figures(self, results: Json) -> str: ...

    def sections(self, page: Page, results: Json, prefix: str) -> str: ...


MAKERS: dict[str, Maker] = {
    "bench": bench,
    "sweep": sweep,
    "tune": tune,
    "plan": plan,
    "trace": trace,
}
# Those that are not compared: they stand one after the other.
_ALONE = ("plan", "trace")


def make_page(runs: Sequence[Run]) -> str:
    """Returns the page as text, from pairs of a file name and the results that load() returned."""
    runs = list(zip(_labels([name for name, _ in runs]), (results for _, results in runs)))
    page = Page()
    title = _title(runs)
    body = [f"<header>{_head(runs, title)}</header>", "<main>"]
    for command in MAKERS:
        same = [(label, results) for label, results in runs if results["command"] == command]
        if len(same) > 1 and command not in _ALONE:
            body.append(compare.sections(page, same, command))
    for index, (label, results) in enumerate(runs, 1):
        body.append(_run(page, label, results, f"run-{index}", alone=len(runs) == 1))
    versions = sorted({str(results.get("tensorferry", "")) for _, results in runs} - {""})
    body.append("</main>")
    body.append(
        "<footer>"
        + paragraph(
            f"Measured by tensorferry {', '.join(versions)}. GB is 1,000,000,000 bytes and MB a "
            "thousandth of it; KiB, MiB and GiB are powers of 1,024. 95 % intervals are of the "
            "mean, by Student's t."
        )
        + "</footer>"
    )
    return page.document(f"tensorferry: {title}", "\n".join(body), get_plotlyjs())


def _labels(names: list[str]) -> list[str]:
    """Shortens file names as far as they stay different."""
    short = [Path(name).name for name in names]
    if len(set(short)) == len(short):
        return short
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({place})" for place, name in enumerate(names, 1)]


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return _drives(runs[0][1])
    drives = list(dict.fromkeys(_drives(results) for _, results in runs))
    return f"{len(runs)} runs on {drives[0] if len(drives) == 1 else plural(len(drives), 'drive')}"


def _head(runs: Sequence[Run], title: str) -> str:
    commands = list(dict.fromkeys(results["command"] for _, results in runs))
    eyebrow = paragraph("tensorferry " + ", ".join(commands), "eyebrow")
    if len(runs) == 1:
        return eyebrow + heading(1, title) + paragraph(_where(runs[0][1]), "lead")
    links = [
        (f"compare-{command}", f"Compare {command}")
        for command in MAKERS
        if command not in _ALONE and sum(r["command"] == command for _, r in runs) > 1
    ]
    links += [(f"run-{index}", label) for index, (label, _) in enumerate(runs, 1)]
    items = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links)
    rows = [
        [label, results["command"], _when(results), _host(results), _drives(results)]
        for label, results in runs
    ]
    return (
        eyebrow
        + heading(1, title)
        + f'<nav aria-label="Contents"><ul>{items}</ul></nav>'
        + table("Runs", ["File", "Command", "Started", "Machine", "Drive"], rows)
    )


def _run(page: Page, label: str, results: Json, name: str, alone: bool) -> str:
    maker = MAKERS[results["command"]]
    parts = []
    if not alone:
        parts += [
            paragraph(f"tensorferry {results['command']}", "eyebrow"),
            heading(2, label, name),
            paragraph(f"{_drives(results)}. {_where(results)}", "lead"),
        ]
    if not results["complete"]:
        parts.append(
            paragraph("This run was interrupted. The page shows its finished part.", "notice")
        )
    parts.append(maker.figures(results))
    parts.append(maker.sections(page, results, name))
    parts.append(section(heading(3, "Machine and settings"), _facts(results)))
    style = "only" if alone else "run"
    return f'<article class="{style}">' + "\n".join(parts) + "</article>"


def _member(value: object, *names: str) -> str:
    """Returns a member of a member as text, or an empty text if it is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None or isinstance(value, (dict, list)) else str(value)


def _drive(place: Json) -> str:
    model, name = _member(place, "drive", "model"), _member(place, "drive", "name")
    return " ".join(filter(None, [model, f"({name})" if model and name else name])) or (
        _member(place, "directory")
    )


def _drives(results: Json) -> str:
    if results["command"] == "plan":
        return f"a plan for {digits(results['settings']['task']['parameters'] / 1e9)} G parameters"
    drives = dict.fromkeys(filter(None, map(_drive, results["places"])))
    return ", ".join(drives) or "an unknown drive"


def _host(results: Json) -> str:
    return _member(results["machine"], "host") or "an unknown machine"


def _when(results: Json) -> str:
    started = _member(results, "started")
    try:
        moment = datetime.datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return started
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def _where(results: Json) -> str:
    places = [
        " on ".join(
            filter(None, [_member(place, "file_system", "kind"), _member(place, "directory")])
        )
        for place in results["places"]
    ]
    return " · ".join(filter(None, [_host(results), ", ".join(places), _when(results)]))


def _facts(results: Json) -> str:
    machine = results["machine"]
    memory = number(machine.get("memory_bytes"))
    pairs = [
        ("Machine", _host(results)),
        (
            "Processor",
            " × ".join(
                filter(None, [_member(machine, "processors"), _member(machine, "processor")])
            ),
        ),
        ("Memory", size(memory) if memory is not None else ""),
        (
            "Kernel",
            " ".join(filter(None, [_member(machine, "kernel"), _member(machine, "architecture")])),
        ),
    ]
    for place in results["places"]:
        system: Json = place["file_system"] if isinstance(place.get("file_system"), dict) else {}
        drive: Json = place["drive"] if isinstance(place.get("drive"), dict) else {}
        pairs.append(("Drive", _drive(place)))
        pairs.append(("Directory", _member(place, "directory")))
        pairs.append(
            (
                "File system",
                ", ".join(
                    filter(
                        None,
                        [
                            _member(system, "kind"),
                            _member(system, "mount_options"),
                            f"{size(system['free_bytes'])} of {size(system.get('bytes'))} free"
                            if "free_bytes" in system
                            else "",
                        ],
                    )
                ),
            )
        )
        pairs.append(
            (
                "Drive settings",
                _plain(
                    {name: value for name, value in drive.items() if name not in ("name", "model")}
                ),
            )
        )
    pairs.append(("Settings", _plain(results["settings"])))
    pairs.append(("Command line", " ".join(map(str, results.get("arguments") or ()))))
    return facts(pairs)


def _plain(members: Json) -> str:
    """Shows an object as words: `queue depth 64, block 2 MiB`."""
    words = []
    for name, value in members.items():
        is_size = name.endswith(("bytes", "bytes_max")) or name == "sizes"
        name = name.removesuffix("_bytes").replace("_bytes_max", "_max").replace("_", " ")
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            shown = json.dumps(value)
        else:
            shown = " ".join(_word(one, is_size) for one in values)
        if shown:
            words.append(f"{name} {shown}")
    return ", ".join(words)


def _word(value: Any, is_size: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if number(value) is not None:
        return size(value) if is_size else f"{value:g}" if value < 1e6 else digits(value)
    return "" if value is None else str(value)
