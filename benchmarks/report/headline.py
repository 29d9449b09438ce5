"""A run in a user's words: the first table of docs/performance.md, and docs/pictures/speed.svg.

python -m benchmarks.report.headline   # draws the picture from results.json
"""

from __future__ import annotations

import argparse
import json
from html import escape
from math import log
from typing import Any

from benchmarks.jobs.job import ROOT
from benchmarks.report.page import markdown_line, picture
from benchmarks.report.results import cells
from benchmarks.rows.pairs import standing
from benchmarks.rows.row import MORE_IS_BETTER

PICTURE = ROOT / "docs" / "pictures" / "speed.svg"
HEAD = "| what you do | beside | tensorferry | the other | times as fast |"

# (what a user does, the other side, the row): at most ten.
LINES = (
    ("read 10,000 small tensors", "DeepSpeed, one by one",
     "10,000 tensors of 4 to 64 KiB, one call / DeepSpeed one by one"),
    ("save a tensor of 1 GiB", "torch.save", "save a tensor of 1 GiB / torch.save"),
    ("write a torch tensor of 1 GiB", "DeepSpeed",
     "ordinary torch tensor, write, 1 GiB / DeepSpeed"),
    ("read a torch tensor of 1 GiB", "DeepSpeed",
     "ordinary torch tensor, read, 1 GiB / DeepSpeed"),
    ("step AdamW, states on NVMe", "DeepSpeed ZeRO-3",
     "AdamW step, 200 M parameters in fp32 / DeepSpeed ZeRO-3 on NVMe"),
    ("read 1 GiB, page-locked memory", "fio", "page-locked read, 1 GiB / fio"),
    ("read 4 KiB, 64 at a time", "fio",
     "operations of 4 KiB, 64 at a time, random reads / fio"),
    ("load a tensor of 1 GiB", "safetensors", "load a tensor of 1 GiB / safetensors"),
)  # fmt: skip


def times_as_fast(row: dict[str, Any]) -> float:
    return row["ratio"] if row["unit"] in MORE_IS_BETTER else 1 / row["ratio"]


def is_even(row: dict[str, Any]) -> bool:
    """Whether the noise hides which side is faster."""
    return standing(row["low"], row["high"], row["unit"] in MORE_IS_BETTER) == "even"


def chosen(rows: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    known = {row["name"]: row for row in rows}
    if missing := [name for _, _, name in LINES if name not in known]:
        raise SystemExit(f"the run lacks rows of the first table: {'; '.join(missing)}")
    return [(what, beside, known[name]) for what, beside, name in LINES]


def ratio_text(row: dict[str, Any]) -> str:
    return f"{times_as_fast(row):.2g}" if times_as_fast(row) >= 2 else f"{times_as_fast(row):.2f}"


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the first table, without its head."""
    lines = []
    for what, beside, row in chosen(rows):
        ours, other = (f"{float(value):.3g} {row['unit']}" for value in cells(row)[1:3])
        ratio = ratio_text(row) + (", even" if is_even(row) else "")
        lines.append(markdown_line([what, beside, ours, other, ratio]))
    return lines


def draw(rows: list[dict[str, Any]]) -> str:
    """One bar per line, from even (1) to the right for faster and to the left for slower; the axis
    is logarithmic."""
    even, right, step = 330, 790, 27
    height = 36 + step * len(LINES)
    scale = (right - even) / log(max(times_as_fast(row) for _, _, row in chosen(rows)))
    parts = [
        f'<text class="soft" x="{even + 8}" y="18">tensorferry is faster</text>',
        f'<text class="soft" x="{even - 8}" y="18" text-anchor="end">the other is faster</text>',
    ]
    for number, (what, beside, row) in enumerate(chosen(rows)):
        y = 32 + step * number
        end = even + scale * log(times_as_fast(row))
        kind = "even" if is_even(row) else "slower" if end < even else "faster"
        parts.append(
            f'<text x="12" y="{y + 14}">{escape(what)}</text>'
            f'<rect class="{kind}" x="{min(even, end):.1f}" y="{y}" '
            f'width="{abs(end - even):.1f}" height="18" rx="2"/>'
            f'<text x="{max(even, end) + 8:.1f}" y="{y + 14}">'
            f"{ratio_text(row)}x {escape(beside)}</text>"
        )
    parts.append(f'<line class="grid" x1="{even}" x2="{even}" y1="26" y2="{height - 8}"/>')
    style = (
        "svg .faster { fill: var(--blue) } svg .slower { fill: var(--open) } "
        "svg .even { fill: var(--soft) }"
    )
    label = "How many times as fast as others tensorferry is"
    return picture(
        f'<svg viewBox="0 0 1020 {height}" aria-label="{label}" role="img">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    PICTURE.write_text(draw(results["rows"]))


if __name__ == "__main__":
    main()
