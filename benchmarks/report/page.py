"""A report as text and as one HTML file: no scripts, no other files, readable offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707f; --line: #d9dee5; --back: #fff;
  --panel: #f6f8fa; --blue: #2563a8; --good: #19794a; --bad: #b3261e; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a2b0; --line: #363e4a;
  --back: #14181e; --panel: #1b2028; --blue: #74a9e6; --good: #5cc48d; --bad: #f08a82;
  --open: #d9ac4a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p, dd, dt { max-width: 46rem } .soft { color: var(--soft) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap }
td:first-child { white-space: normal; min-width: 18rem }
th { color: var(--soft); font-weight: 600 } td.number, th.number { text-align: right }
.holds { color: var(--good); font-weight: 600 } .misses { color: var(--bad); font-weight: 600 }
.unclear { color: var(--open); font-weight: 600 }
.ahead { color: var(--good) } .behind { color: var(--bad) } .even { color: var(--soft) }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .15rem 1rem } dd { margin: 0 }
dt { color: var(--soft) }
svg { width: 100%; height: auto; background: var(--panel); border-radius: 6px }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif } svg .soft { fill: var(--soft) }
svg .grid { stroke: var(--line) }
svg .dot { fill: var(--blue); opacity: .35 } svg .span { stroke: var(--blue); stroke-width: 3 }
svg .mid { fill: var(--blue) } svg .target { stroke: var(--bad); stroke-width: 2 }
"""

# Words that are a verdict, each a class of STYLE.
VERDICTS = ("holds", "misses", "unclear", "ahead", "even", "behind")


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """A table for a terminal."""
    lines = [list(head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i in numbers else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a document."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(markdown_line(line) for line in lines) + "\n"


def markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def facts_list(facts: dict[str, str]) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """`numbers` are the columns to align right. A cell that is a verdict gets its colour."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = "number" if column in numbers else ""
        if text in VERDICTS:
            kind = text
        return f'<{tag} class="{kind}">{escape(text)}</{tag}>'

    lines = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    heads = "".join(cell("th", i, text) for i, text in enumerate(head))
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def steps(low: float, high: float, most: int = 9) -> list[float]:
    """Round numbers that cover a range."""
    step = next(
        size * 10.0**power
        for power in range(-4, 7)
        for size in (1, 2, 5)
        if (high - low) / (size * 10.0**power) <= most
    )
    return [n * step for n in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


# The axis of ratios is logarithmic: twice and half as fast are equally far from even.
RATIO_TICKS = (0.25, 0.5, 0.7, 0.9, 1.0, 1.25, 1.5, 2, 3, 4, 8)


def ratio_chart(
    rows: Sequence[tuple[str, Sequence[float], float, float, float, float | None]],
) -> str:
    """One line per row: (name, the ratios, median, low, high, target). Dots are pairs, the thick
    line is the interval, the red mark the target."""
    left, right = 610, 1180
    height = 34 + 26 * len(rows)

    def x(ratio: float) -> float:
        low, high = RATIO_TICKS[0], RATIO_TICKS[-1]
        share = log(min(max(ratio, low), high) / low) / log(high / low)
        return left + (right - left) * share

    parts = [
        f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="24" y2="{height - 6}"/>'
        f'<text class="soft" x="{x(t):.1f}" y="17" text-anchor="middle">{t:g}</text>'
        for t in RATIO_TICKS
    ]
    for number, (name, ratios, middle, from_, to, target) in enumerate(rows):
        y = 42 + 26 * number
        parts.append(f'<text x="12" y="{y + 4}">{escape(name)}</text>')
        parts += [f'<circle class="dot" cx="{x(r):.1f}" cy="{y}" r="3"/>' for r in ratios]
        parts.append(f'<line class="span" x1="{x(from_):.1f}" x2="{x(to):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<circle class="mid" cx="{x(middle):.1f}" cy="{y}" r="5">'
            f"<title>{middle:.3f} ({from_:.3f} to {to:.3f})</title></circle>"
        )
        if target:
            at = f'x1="{x(target):.1f}" x2="{x(target):.1f}"'
            parts.append(f'<line class="target" {at} y1="{y - 9}" y2="{y + 9}"/>')
    return f'<svg viewBox="0 0 1200 {height}" role="img">{"".join(parts)}</svg>'


# Lines of one chart; the first is ours.
LINE_COLOURS = ("#2563a8", "#c2571a", "#19794a")


def line_chart(
    x_name: str, unit: str, x_texts: Sequence[str], lines: Mapping[str, Sequence[float]]
) -> str:
    """Values over points at equal distances, such as sizes that double."""
    width, height, left, bottom, top = 620, 300, 56, 258, 34
    ticks = steps(0, max(value for values in lines.values() for value in values) * 1.05, 6)
    across = (width - left - 24) / max(len(x_texts) - 1, 1)

    def at(number: int, value: float) -> tuple[float, float]:
        return left + across * number, bottom - (bottom - top) * value / ticks[-1]

    parts = []
    for tick in ticks:
        y = at(0, tick)[1]
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 16}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="soft" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    for number, text in enumerate(x_texts):
        x = at(number, 0)[0]
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{escape(text)}</text>"
        )
    parts.append(
        f'<text class="soft" x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{escape(x_name)}</text>"
    )
    parts.append(f'<text class="soft" x="8" y="18">{escape(unit)}</text>')
    for number, ((name, values), colour) in enumerate(zip(lines.items(), LINE_COLOURS)):
        spots = [at(i, value) for i, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        x = left + 60 + 170 * number
        parts.append(f'<rect x="{x}" y="9" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="18">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def picture(svg: str) -> str:
    """A chart as one file, with its style inside."""
    style = "".join(line for line in STYLE.splitlines(keepends=True) if line.startswith("svg"))
    colours = STYLE[STYLE.index(":root") : STYLE.index("body {")]
    return svg.replace(
        ' role="img">',
        ' xmlns="http://www.w3.org/2000/svg" role="img"><style>' + colours + style + "</style>",
        1,
    )


def write(path: Path, title: str, lead: str, sections: Sequence[tuple[str, str]]) -> None:
    """Sections are (heading, HTML)."""
    body = "".join(f"<h2>{escape(head)}</h2>{html}" for head, html in sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p>{body}</html>\n'
    )
