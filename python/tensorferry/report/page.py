"""The page of a report: numbers with units, tables, plots, and the document that holds them.

It knows nothing of commands. Its functions take plain text and escape it; only their results may go
into the page unescaped.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Interval = tuple[float | None, float | None]  # low, high

NONE = "–"
SPACE = "\u00a0"  # between a number and its unit, where no line may end


def number(value: object) -> float | None:
    """Returns a finite number as a float, and None for anything else in a results file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def numbers(values: Iterable[object]) -> list[float]:
    """Returns the finite numbers of a list."""
    return [value for value in map(number, values) if value is not None]


def digits(value: object, significant: int = 3) -> str:
    """Shows 1234.5 as 1,234 and 0.012345 as 0.0123, and a dash for anything but a number."""
    shown = number(value)
    if shown is None:
        return NONE
    if shown == 0:
        return "0"
    if not 1e-9 < abs(shown) < 1e15:
        return f"{shown:.2e}"
    decimals = significant - 1 - math.floor(math.log10(abs(shown)))
    return f"{shown:,.{max(0, min(decimals, 12))}f}"


def count(value: object) -> str:
    """Shows a whole number without decimals: 64, 1,024."""
    shown = number(value)
    if shown is None:
        return NONE
    return f"{shown:,.0f}" if shown == int(shown) else digits(shown)


def size(value: object) -> str:
    """Shows bytes in the binary unit that suits: 2 MiB, 1.5 GiB."""
    amount = number(value)
    if amount is None:
        return NONE
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(amount) >= scale:
            return f"{count(amount / scale)}{SPACE}{unit}"
    return f"{amount:,.0f}{SPACE}B"


class DisplayUnit:
    """The unit in which a column or an axis shows its values."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale = name, scale

    def of(self, value: object) -> float | None:
        amount = number(value)
        return None if amount is None else amount * self.scale

    def digits(self, value: object) -> str:
        return digits(self.of(value))

    def text(self, value: object) -> str:
        return NONE if number(value) is None else f"{self.digits(value)}{SPACE}{self.name}"

    def interval(self, pair: Sequence[object]) -> str:
        low, high = pair if len(pair) == 2 else (None, None)
        if number(low) is None or number(high) is None:
            return NONE
        return f"{self.digits(low)} to {self.digits(high)}"


def time_unit(seconds: Iterable[object]) -> DisplayUnit:
    """Chooses a unit for values in seconds."""
    values = sorted(abs(value) for value in numbers(seconds))
    middle = values[len(values) // 2] if values else 0
    if middle < 1e-3:
        return DisplayUnit("µs", 1e6)
    return DisplayUnit("ms", 1e3) if middle < 1 else DisplayUnit("s", 1)


def rate_unit(mb_per_second: Iterable[object]) -> DisplayUnit:
    """Chooses a unit for values in MB/s."""
    largest = max(numbers(mb_per_second), default=0)
    return DisplayUnit("GB/s", 1e-3) if largest >= 1000 else DisplayUnit("MB/s", 1)


def plural(amount: object, one: str) -> str:
    return f"{count(amount)} {one if amount == 1 else one + 's'}"


def escape(text: object) -> str:
    """Escapes plain text for the page, and for labels of plots, which read tags too."""
    return html.escape(str(text))


def paragraph(text: str, style: str | None = None) -> str:
    return f"<p{_class(style)}>{escape(text)}</p>"


def heading(level: int, text: str, name: str | None = None) -> str:
    identity = f' id="{escape(name)}"' if name else ""
    return f"<h{level}{identity}>{escape(text)}</h{level}>"


def section(*parts: str) -> str:
    return "<section>" + "\n".join(part for part in parts if part) + "</section>"


def code(text: str, label: str) -> str:
    return f'<pre tabindex="0" role="region" aria-label="{escape(label)}">{escape(text)}</pre>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Makes a list of names and values. It leaves out pairs without a value."""
    rows = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in pairs
        if value
    ]
    return '<dl class="facts">' + "".join(rows) + "</dl>"


def key_figures(figures: Iterable[tuple[str, str, str, str]]) -> str:
    """Shows the few numbers to see first: (label, number, unit, detail)."""
    items = [
        f'<li><span class="label">{escape(label)}</span>'
        f"<strong>{escape(value)} <small>{escape(unit)}</small></strong>"
        f'<span class="detail">{escape(detail)}</span></li>'
        for label, value, unit, detail in figures
    ]
    return f'<ul class="figures">{"".join(items)}</ul>' if items else ""


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> str:
    """Makes a table that scrolls in its own box. Columns whose names begin with # hold numbers."""
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


def folded(summary: str, content: str) -> str:
    """Hides content until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def side_by_side(*plots: str) -> str:
    """Puts two plots in a row where the window is wide enough."""
    return f'<div class="row">{"".join(plots)}</div>' if any(plots) else ""


def mix(first: str, last: str, share: float) -> str:
    """Names a colour between two of the style sheet's; `page.js` computes it."""
    return f"mix(--{first}, --{last}, {share:.3f})"


def steps(name: str, count: int) -> list[str]:
    """Names `count` colours of one hue, from small to large."""
    shares = [0.5] if count == 1 else [step / (count - 1) for step in range(count)]
    return [mix(f"{name}-low", f"{name}-high", share) for share in shares]


class Page:
    """Collects plots while sections are made, then writes the document around them."""

    def __init__(self) -> None:
        self._plots: dict[str, Json] = {}

    def plot(
        self,
        name: str,
        title: str,
        description: str,
        data: list[Json],
        layout: Json,
        note: str = "",
        style: str = "plot",
    ) -> str:
        """Makes the place of a plot, which `page.js` draws when the reader opens the page.

        `description` is for readers who cannot see the plot. Colours are `var(--name)` of the style
        sheet, so that they follow it. plotly reads tags in the names and texts of data and layout:
        the caller escapes text from outside.
        """
        self._plots[name] = {"data": data, "layout": layout}
        note = paragraph(note, "note") if note else ""
        return (
            f"<figure><figcaption>{escape(title)}</figcaption>"
            f'<div id="{escape(name)}" class="{style}" role="img" '
            f'aria-label="{escape(description)}"></div>{note}</figure>'
        )

    def document(self, title: str, body: str, plotly: str) -> str:
        """Returns the whole page. `plotly` is the text of plotly.js."""
        style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
        drawing = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
        # A browser changes these line ends before it compares the hashes below.
        scripts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in (plotly, drawing)]
        # The page fetches nothing, and runs only these two scripts.
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


def _class(style: str | None) -> str:
    return f' class="{style}"' if style else ""


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(member) for member in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
