"""`tensorferry report`: results files in, one HTML page out.

    tensorferry report before.json after.json -o report.html

The page holds all it needs, plotly.js too, and asks nobody for anything. docs/results.md describes
the files. Needs plotly: `pip install '.[report]'` in a checkout.
"""

import argparse
import datetime
import json
import os
import secrets
import stat
import sys
from pathlib import Path

from plotly.offline import get_plotlyjs

from . import _report_bench, _report_compare, _report_sweep, _report_tune
from ._report_page import (
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

__all__ = ["Unusable", "load", "main", "make_page"]

FORMAT = "tensorferry-results"
VERSION = 1
MAKERS = {"bench": _report_bench, "sweep": _report_sweep, "tune": _report_tune}

# What the page cannot do without. A type; REAL, a finite number; MEASURE, which may be null; a set
# of words; a list with the shape of its members; a tuple with the shape of each; a dictionary, of
# which names that end in ? may be missing.
REAL, MEASURE = object(), object()
SUMMARY = {"mean": MEASURE, "median": MEASURE, "ci95?": (MEASURE, MEASURE), "p50": MEASURE,
           "p90": MEASURE, "p99": MEASURE}
SETTING = {"engine": str, "block_bytes": REAL, "queue_depth": REAL, "workers": REAL}
ALL = {"complete": bool, "machine": dict, "places": [dict], "settings": dict, "arguments?": list}
SHAPES = {
    "bench": ALL | {"series": [{
        "direction": {"read", "write"}, "bytes": REAL, "seconds": [MEASURE],
        "started_seconds?": [MEASURE], "latency_seconds": SUMMARY,
        "bandwidth_mb_per_second": SUMMARY,
    }]},
    "sweep": ALL | {"points": [{
        "direction": {"read", "write"}, "block_bytes": REAL, "queue_depth": REAL, "workers": REAL,
        "overlap": {"overlap", "sequential"}, "status": {"ok", "failed"}, "seconds?": [MEASURE],
        "gb_per_second?": MEASURE,
    }]},
    "tune": ALL | {"rounds": [{"candidates": [SETTING]}], "best?": SETTING, "default?": SETTING},
}


class Unusable(Exception):
    """A file that no page can be made from. Its text says which, why, and what to do."""


def load(path):
    """The results in a file. Raises Unusable."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    try:
        results = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path}: not JSON; give a file that `tensorferry bench`, `sweep` or `tune` "
                       "wrote with --json") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise Unusable(f"{path}: not results of tensorferry; give a file that `tensorferry bench`, "
                       "`sweep` or `tune` wrote with --json")
    version = results.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise Unusable(f"{path}: results of version {version!r}, and this program reads {VERSION}; "
                       "update tensorferry")
    command = results.get("command")
    if not isinstance(command, str) or command not in SHAPES:
        raise Unusable(f"{path}: results of an unknown command, {command!r}; update tensorferry")
    problem = _misfit(results, SHAPES[command], "")
    if problem:
        raise Unusable(f"{path}: {problem}; measure anew, or see docs/results.md")
    return results


def _misfit(value, shape, where):
    """What keeps a value from having a shape; None if nothing does."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is not an object"
        for name, member in shape.items():
            plain = name.rstrip("?")
            at = f"{where}.{plain}".lstrip(".")
            if plain not in value or (name != plain and value[plain] is None):
                if name == plain:
                    return f"{at} is missing"
                continue
            problem = _misfit(value[plain], member, at)
            if problem:
                return problem
        return None
    if isinstance(shape, (list, tuple)):
        if not isinstance(value, list):
            return f"{where} is not a list"
        if isinstance(shape, tuple) and len(value) != len(shape):
            return f"{where} has not {len(shape)} members"
        checks = (_misfit(member, shape[0], f"{where}[{at}]") for at, member in enumerate(value))
        return next((problem for problem in checks if problem), None)
    if isinstance(shape, set):
        fits, kind = isinstance(value, str) and value in shape, " or ".join(sorted(shape))
    elif shape is REAL:
        fits, kind = number(value) is not None, "a number"
    elif shape is MEASURE:
        fits = value is None or isinstance(value, (int, float)) and not isinstance(value, bool)
        kind = "a number"
    else:
        names = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
        fits, kind = isinstance(value, shape), names[shape]
    return None if fits else f"{where} is not {kind}"


def make_page(runs):
    """The page as text, from pairs of (file name, results as load() returned them)."""
    runs = list(zip(_labels([name for name, _ in runs]), (results for _, results in runs)))
    page = Page()
    title = _title(runs)
    body = [f"<header>{_head(runs, title)}</header>", "<main>"]
    for command in MAKERS:
        same = [(label, results) for label, results in runs if results["command"] == command]
        if len(same) > 1:
            body.append(_report_compare.sections(page, same, command))
    for index, (label, results) in enumerate(runs, 1):
        body.append(_run(page, label, results, f"run-{index}", alone=len(runs) == 1))
    versions = sorted({str(results.get("tensorferry", "")) for _, results in runs} - {""})
    body.append("</main>")
    body.append("<footer>" + paragraph(
        f"Measured by tensorferry {', '.join(versions)}. GB is 1,000,000,000 bytes and MB a "
        "thousandth of it; KiB, MiB and GiB are powers of 1,024. 95 % intervals are of the mean, "
        "by Student's t.") + "</footer>")
    return page.document(f"tensorferry: {title}", "\n".join(body), get_plotlyjs())


def _labels(names):
    """File names as short as they can be told apart."""
    short = [Path(name).name for name in names]
    if len(set(short)) == len(short):
        return short
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({place})" for place, name in enumerate(names, 1)]


def _title(runs):
    if len(runs) == 1:
        return _drives(runs[0][1])
    drives = list(dict.fromkeys(_drives(results) for _, results in runs))
    return f"{len(runs)} runs on {drives[0] if len(drives) == 1 else plural(len(drives), 'drive')}"


def _head(runs, title):
    commands = list(dict.fromkeys(results["command"] for _, results in runs))
    eyebrow = paragraph("tensorferry " + ", ".join(commands), "eyebrow")
    if len(runs) == 1:
        return eyebrow + heading(1, title) + paragraph(_where(runs[0][1]), "lead")
    links = [(f"compare-{command}", f"Compare {command}") for command in MAKERS
             if sum(results["command"] == command for _, results in runs) > 1]
    links += [(f"run-{index}", label) for index, (label, _) in enumerate(runs, 1)]
    items = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links)
    rows = [[label, results["command"], _when(results), _host(results), _drives(results)]
            for label, results in runs]
    return (eyebrow + heading(1, title) + f'<nav aria-label="Contents"><ul>{items}</ul></nav>'
            + table("Runs", ["File", "Command", "Started", "Machine", "Drive"], rows))


def _run(page, label, results, name, alone):
    maker = MAKERS[results["command"]]
    parts = []
    if not alone:
        parts += [paragraph(f"tensorferry {results['command']}", "eyebrow"),
                  heading(2, label, name),
                  paragraph(f"{_drives(results)}. {_where(results)}", "lead")]
    if not results["complete"]:
        parts.append(paragraph("This run was interrupted. What was finished is here.", "notice"))
    parts.append(maker.figures(results))
    parts.append(maker.sections(page, results, name))
    parts.append(section(heading(3, "Machine and settings"), _facts(results)))
    style = "only" if alone else "run"
    return f'<article class="{style}">' + "\n".join(parts) + "</article>"


def _member(value, *names):
    """A member of a member, as text; empty where it is not."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None or isinstance(value, (dict, list)) else str(value)


def _drive(place):
    model, name = _member(place, "drive", "model"), _member(place, "drive", "name")
    return " ".join(filter(None, [model, f"({name})" if model and name else name])) or (
        _member(place, "directory"))


def _drives(results):
    drives = dict.fromkeys(filter(None, map(_drive, results["places"])))
    return ", ".join(drives) or "an unknown drive"


def _host(results):
    return _member(results["machine"], "host") or "an unknown machine"


def _when(results):
    started = _member(results, "started")
    try:
        moment = datetime.datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return started
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def _where(results):
    places = [" on ".join(filter(None, [_member(place, "file_system", "kind"),
                                        _member(place, "directory")]))
              for place in results["places"]]
    return " · ".join(filter(None, [_host(results), ", ".join(places), _when(results)]))


def _facts(results):
    machine = results["machine"]
    memory = number(machine.get("memory_bytes"))
    pairs = [
        ("Machine", _host(results)),
        ("Processor", " × ".join(filter(None, [_member(machine, "processors"),
                                               _member(machine, "processor")]))),
        ("Memory", size(memory) if memory is not None else ""),
        ("Kernel", " ".join(filter(None, [_member(machine, "kernel"),
                                          _member(machine, "architecture")]))),
    ]
    for place in results["places"]:
        system = place.get("file_system") if isinstance(place.get("file_system"), dict) else {}
        drive = place.get("drive") if isinstance(place.get("drive"), dict) else {}
        pairs.append(("Drive", _drive(place)))
        pairs.append(("Directory", _member(place, "directory")))
        pairs.append(("File system", ", ".join(filter(None, [
            _member(system, "kind"), _member(system, "mount_options"),
            f"{size(system['free_bytes'])} of {size(system.get('bytes'))} free"
            if "free_bytes" in system else "",
        ]))))
        pairs.append(("Drive settings", _plain(
            {name: value for name, value in drive.items() if name not in ("name", "model")})))
    pairs.append(("Settings", _plain(results["settings"])))
    pairs.append(("Command line", " ".join(map(str, results.get("arguments") or ()))))
    return facts(pairs)


def _plain(members):
    """An object as words: `queue depth 64, block 2 MiB`."""
    words = []
    for name, value in members.items():
        is_size = name.endswith("bytes") or name == "sizes" or name.endswith("bytes_max")
        name = name.removesuffix("_bytes").replace("_bytes_max", "_max").replace("_", " ")
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            shown = json.dumps(value)
        else:
            shown = " ".join(_word(one, is_size) for one in values)
        if shown:
            words.append(f"{name} {shown}")
    return ", ".join(words)


def _word(value, is_size):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if number(value) is not None:
        return size(value) if is_size else f"{value:g}" if value < 1e6 else digits(value)
    return "" if value is None else str(value)


def _write(path, text):
    """Readers of the file see the old page or the new one."""
    # A name that is no UTF-8 does not spoil the page.
    data = text.encode("utf-8", "replace")
    path = os.path.realpath(path)
    before = os.stat(path) if os.path.exists(path) else None
    if before and not stat.S_ISREG(before.st_mode):  # a pipe or a terminal cannot be replaced
        Path(path).write_bytes(data)
        return
    # Under a name that nobody can foresee, and in no file that is there.
    fresh = f"{path}.new-{secrets.token_hex(8)}"
    with open(fresh, "xb") as file:
        try:
            file.write(data)
            file.flush()
            if before:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            os.replace(fresh, path)
        except OSError:
            os.unlink(fresh)
            raise


def main(argv=None):
    """Makes the page; returns the exit status: 0, or 1 with a line on stderr."""
    parser = argparse.ArgumentParser(prog="tensorferry report", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", help="files that bench, sweep or tune wrote (--json)")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write")
    arguments = parser.parse_args(argv)
    try:
        runs = [(path, load(path)) for path in arguments.results]
        if any(os.path.exists(arguments.output) and os.path.samefile(path, arguments.output)
               for path in arguments.results):
            raise Unusable(f"{arguments.output}: holds results; name another file with -o")
        _write(arguments.output, make_page(runs))
    except Unusable as error:
        print(f"tensorferry report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tensorferry report: {arguments.output}: {error.strerror}; name another place with "
              "-o", file=sys.stderr)
        return 1
    print(f"Report: {arguments.output} ({plural(len(runs), 'run')})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
