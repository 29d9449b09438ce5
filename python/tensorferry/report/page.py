"""The page of a report: numbers with units, tables, plots, and the document that holds them.

It knows nothing of commands. Text comes in plain and is escaped here, on its way into the page;
only what a function of this module returned may be put into the page as it is.
"""

import base64
import hashlib
import html
import json
import math
from pathlib import Path

NONE = "–"
SPACE = "\u00a0"  # between a number and its unit, where no line may end


def number(value):
    """A finite float, or None for anything else that a results file may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def numbers(values):
    """The finite numbers of a list."""
    return [value for value in map(number, values) if value is not None]


def digits(value, significant=3):
    """1234.5 as 1,234 and 0.012345 as 0.0123; a dash for what is no number."""
    value = number(value)
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if not 1e-9 < abs(value) < 1e15:
        return f"{value:.2e}"
    decimals = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, min(decimals, 12))}f}"


def count(value):
    """A whole number as such: 64, 1,024."""
    value = number(value)
    if value is None:
        return NONE
    return f"{value:,.0f}" if value == int(value) else digits(value)


def size(value):
    """Bytes in the binary unit that suits: 2 MiB, 1.5 GiB."""
    value = number(value)
    if value is None:
        return NONE
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= scale:
            return f"{count(value / scale)}{SPACE}{unit}"
    return f"{value:,.0f}{SPACE}B"


class Unit:
    """One unit for a column or an axis, chosen for the values that it will show."""

    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def of(self, value):
        value = number(value)
        return None if value is None else value * self.scale

    def digits(self, value):
        return digits(self.of(value))

    def text(self, value):
        return NONE if number(value) is None else f"{self.digits(value)}{SPACE}{self.name}"

    def interval(self, pair):
        low, high = pair if len(pair) == 2 else (None, None)
        if number(low) is None or number(high) is None:
            return NONE
        return f"{self.digits(low)} to {self.digits(high)}"


def time_unit(seconds):
    """For seconds."""
    values = sorted(abs(value) for value in numbers(seconds))
    middle = values[len(values) // 2] if values else 0
    if middle < 1e-3:
        return Unit("µs", 1e6)
    return Unit("ms", 1e3) if middle < 1 else Unit("s", 1)


def rate_unit(mb_per_second):
    """For values in MB/s."""
    largest = max(numbers(mb_per_second), default=0)
    return Unit("GB/s", 1e-3) if largest >= 1000 else Unit("MB/s", 1)


def plural(amount, one):
    return f"{count(amount)} {one if amount == 1 else one + 's'}"


def escape(text):
    """Plain text for the page, and for labels of plots, which know tags too."""
    return html.escape(str(text))


def paragraph(text, style=None):
    return f"<p{_class(style)}>{escape(text)}</p>"


def heading(level, text, name=None):
    identity = f' id="{escape(name)}"' if name else ""
    return f"<h{level}{identity}>{escape(text)}</h{level}>"


def section(*parts):
    return "<section>" + "\n".join(part for part in parts if part) + "</section>"


def code(text, label):
    return f'<pre tabindex="0" role="region" aria-label="{escape(label)}">{escape(text)}</pre>'


def facts(pairs):
    """A list of names and what they are; a pair without a value is left out."""
    rows = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in pairs
        if value
    ]
    return '<dl class="facts">' + "".join(rows) + "</dl>"


def key_figures(figures):
    """The few numbers to see first: (label, number, unit, detail)."""
    items = [
        f'<li><span class="label">{escape(label)}</span>'
        f"<strong>{escape(value)} <small>{escape(unit)}</small></strong>"
        f'<span class="detail">{escape(detail)}</span></li>'
        for label, value, unit, detail in figures
    ]
    return f'<ul class="figures">{"".join(items)}</ul>' if items else ""


def table(caption, columns, rows, note=""):
    """Columns are names; one that begins with # holds numbers. It scrolls inside its own box."""
    if not rows:
        return ""
    kinds = [_class("number") if name.startswith("#") else "" for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name.lstrip("#"))}</th>'
        for name, kind in zip(columns, kinds)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds))
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<figure class="table"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + (paragraph(note, "note") if note else "")
        + "</figure>"
    )


def folded(summary, content):
    """Content that opens when asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def side_by_side(*plots):
    """Two in a row where there is room."""
    return f'<div class="row">{"".join(plots)}</div>' if any(plots) else ""


def mix(first, last, share):
    """A colour between two of the style sheet's, for script `page.js` to work out."""
    return f"mix(--{first}, --{last}, {share:.3f})"


def steps(name, count):
    """So many colours of one hue, from small to large."""
    shares = [0.5] if count == 1 else [step / (count - 1) for step in range(count)]
    return [mix(f"{name}-low", f"{name}-high", share) for share in shares]


class Page:
    """Collects plots while sections are made, then writes the document around them."""

    def __init__(self):
        self._plots = {}

    def plot(self, name, title, description, data, layout, note="", style="plot"):
        """A place for a plot, which is drawn when the page is open. `description` is for those who
        cannot see it; colours are `var(--name)` of the style sheet, so that they follow it. Names
        and texts of data and layout may hold tags, so what comes from outside is escaped there."""
        self._plots[name] = {"data": data, "layout": layout}
        note = paragraph(note, "note") if note else ""
        return (
            f"<figure><figcaption>{escape(title)}</figcaption>"
            f'<div id="{escape(name)}" class="{style}" role="img" '
            f'aria-label="{escape(description)}"></div>{note}</figure>'
        )

    def document(self, title, body, plotly):
        """The whole of it. `plotly` is the text of plotly.js."""
        style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
        drawing = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
        # The reader of HTML changes these before the hashes below are compared.
        scripts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in (plotly, drawing)]
        # Nothing is ever fetched, and no script runs but these two.
        policy = (
            "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
            + " ".join(f"'sha256-{_sha256(text)}'" for text in scripts)
        )
        tags = "\n".join(f"<script>{text}</script>" for text in scripts)
        plots = json.dumps(_without_nan(self._plots), allow_nan=False, separators=(",", ":"))
        for sign in "<>&":
            plots = plots.replace(sign, f"\\u{ord(sign):04x}")
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<noscript><p class="notice">The plots need JavaScript; the tables do not.</p></noscript>
{body}
<script type="application/json" id="plots">{plots}</script>
{tags}
</body>
</html>
"""


def _class(style):
    return f' class="{style}"' if style else ""


def _sha256(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _without_nan(value):
    if isinstance(value, dict):
        return {name: _without_nan(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(member) for member in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
