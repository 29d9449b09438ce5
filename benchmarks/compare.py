#!/usr/bin/env python3
"""Measures tensorferry against fio, DeepSpeed and others, and its targets: `make compare`.

Each row is a ratio of two jobs that run one right after the other; docs/performance.md has the
method. It lists what it cannot set up here, with the reason. With --against an earlier result, the
exit status is 3 if a ratio fell by more than the noise. --update puts the rows that were measured
into an earlier result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jobs import machine
from benchmarks.jobs.job import NOT_HERE, PROGRAM, REPORTS, ROOT, FioPoint, JobFailed
from benchmarks.jobs.peers import PeerMissing, Peers
from benchmarks.jobs.progress import Progress
from benchmarks.report import page, publish, results
from benchmarks.rows.bench import IN_FLIGHT_BYTES_MAX, Bench
from benchmarks.rows.checkpoint_rows import checkpoint_rows
from benchmarks.rows.class_rows import class_curves, class_rows
from benchmarks.rows.copy_rows import copy_rows
from benchmarks.rows.curves import Curve, curves, million
from benchmarks.rows.drive_rows import drive_rows
from benchmarks.rows.iteration_rows import iteration_rows
from benchmarks.rows.model_rows import model_rows
from benchmarks.rows.offload_rows import offload_rows
from benchmarks.rows.pairs import PAIRS
from benchmarks.rows.peer_rows import import_rows, peer_rows
from benchmarks.rows.row import NO_TIME, OURS, Row
from benchmarks.rows.saving_rows import saving_rows
from benchmarks.rows.scale_rows import scale_rows
from benchmarks.rows.torch_rows import torch_rows

# Other processes that use more than this disturb a pair.
BYSTANDER_CORES_MAX = 0.5
# Pairs of a row without a target; rounds of a curve.
PAIRS_WITHOUT_TARGET, ROUNDS = 10, 5
# Of --quick: pairs per row, and when the last pair begins. The rest takes a few seconds.
QUICK_PAIRS, QUICK_SECONDS = 3, 260
SCRATCH_BYTES, SCRATCH_BYTES_QUICK = 40 * 10**9, 10 * 10**9
SLOW_TO_SET_UP = ("DeepSpeed", "tensornvme")  # they are compiled


def stored_calibration(
    options: argparse.Namespace, before: dict[str, Any] | None, facts: dict[str, str]
) -> dict[str, tuple[FioPoint, float]]:
    """fio's settings of an earlier run on this machine, and its speed with them: so both runs
    compare with the same fio."""
    source = earlier_run(options.calibration) if options.calibration else before
    if not source or not results.same_machine(source["machine"], facts):
        return {}
    points = {cell: FioPoint(**point) for cell, point in source["calibration"].items()}
    speeds = source["calibration_gb_per_second"]
    return {
        cell: (point, speeds[cell][str(point)])
        for cell, point in points.items()
        if str(point) in speeds.get(cell, {})
    }


def earlier_run(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: not the compare.json of an earlier run: {error}") from None


def arguments() -> argparse.Namespace:
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        default=quick,
        help="fewer pairs, sizes and settings of fio: a first look within 5 minutes; also QUICK=1",
    )
    parser.add_argument(
        "--pairs", type=int, help="pairs per row (20, or 10 without a target; 3 with --quick)"
    )
    parser.add_argument(
        "--rows", default="", help="only rows whose name matches this regular expression"
    )
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "build",
        help="for the scratch files, on the drive to measure",
    )
    parser.add_argument("--output", type=Path, default=REPORTS, help="where to write the report")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="the ferry_job to run")
    parser.add_argument(
        "--against", type=Path, help="an earlier compare.json: says which ratios fell since"
    )
    parser.add_argument(
        "--calibration", type=Path, help="a compare.json to take fio's settings from"
    )
    parser.add_argument(
        "--update", type=Path, help="an earlier compare.json that gets the rows of --rows"
    )
    options = parser.parse_args()
    if options.update and (options.quick or not options.rows):
        parser.error("--update needs --rows, and does not go with --quick")
    return options


def take_pair(row: Row, ours_first: bool) -> float:
    """Adds a pair and returns how many cores other processes used meanwhile, if that can be
    told."""
    bystanders = machine.Bystanders()
    row.take(ours_first)
    return 0.0 if row.kernel_works else bystanders.cores()


def with_peers(rows: list[Row], peers: Peers) -> list[Row]:
    """The rows whose peers can be set up here."""
    ready = []
    for row in rows:
        try:
            if row.peer:
                peers.python(row.peer)
            ready.append(row)
        except PeerMissing:
            pass  # peers.missing has the reason
    return ready


def rehearse(rows: list[Row], failed: dict[str, str], progress: Progress) -> list[Row]:
    """Calibrates fio if a row needs it, and runs the other side's job of each row once. Returns the
    rows whose jobs work here."""
    ready = []
    for index, row in enumerate(rows, 1):
        progress.step(f"rehearsal {index} of {len(rows)}: {row.name}")
        try:
            row.other()
            ready.append(row)
        except (JobFailed, PeerMissing) as error:  # our jobs may need a peer's environment too
            failed[row.name] = str(error)
    return ready


def measure(
    rows: list[Row],
    wanted: dict[str, int],
    failed: dict[str, str],
    progress: Progress,
    seconds_max: float = math.inf,
) -> None:
    """Takes a disturbed pair again, whatever it measured, but at most a quarter of all pairs: some
    machines are never quiet. A row whose job fails keeps its pairs and gets no more. No pair begins
    after `seconds_max`."""
    retakes_left = sum(wanted.values()) // 4
    pairs = max(wanted.values(), default=0)
    for number in range(pairs):
        progress.step(f"pair {number + 1} of {pairs}")
        for index, row in enumerate(rows, 1):
            if number >= wanted[row.name] or row.name in failed:
                continue
            if progress.seconds() > seconds_max:
                if not row.pairs:
                    failed[row.name] = NO_TIME
                continue
            progress(f"pair {number + 1} of {pairs}, row {index} of {len(rows)}: {row.name}")
            ours_first = number % 2 == 0
            try:
                busy_cores = take_pair(row, ours_first)
                late = progress.seconds() > seconds_max
                if busy_cores > BYSTANDER_CORES_MAX and retakes_left > 0 and not late:
                    retakes_left -= 1
                    row.pairs.pop()
                    busy_cores = take_pair(row, ours_first)
                row.disturbed += busy_cores > BYSTANDER_CORES_MAX
            except (JobFailed, PeerMissing) as error:
                failed[row.name] = str(error)


def all_rows(bench: Bench, peers: Peers, options: argparse.Namespace) -> list[Row]:
    """The rows to measure; with --quick without those that take minutes to set up."""
    rows = drive_rows(bench)
    rows += scale_rows(bench)
    rows += class_rows(bench)
    rows += peer_rows(bench, peers)
    rows += checkpoint_rows(bench, peers)
    rows += saving_rows(bench, peers)
    rows += import_rows(peers)
    if options.quick:
        rows = [row for row in rows if row.peer not in SLOW_TO_SET_UP]
    else:
        rows += [*copy_rows(), *torch_rows(bench, peers), *offload_rows(bench, peers)]
        rows += iteration_rows(bench, peers)
        rows += model_rows(bench, peers)
    return [row for row in rows if re.search(options.rows, row.name)]


def pairs_wanted(rows: list[Row], options: argparse.Namespace) -> dict[str, int]:
    for_target = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    for_others = options.pairs or (QUICK_PAIRS if options.quick else PAIRS_WITHOUT_TARGET)
    return {row.name: for_target if row.target else for_others for row in rows}


def draw(
    drawn: list[Curve],
    bench: Bench,
    options: argparse.Namespace,
    failed: dict[str, str],
    progress: Progress,
) -> list[Row]:
    """Measures the curves before the processes of the peers start and take memory. Returns the rows
    of a million operations, with their pairs."""
    if options.rows:
        return []
    for curve in [] if options.quick else [*curves(bench), *class_curves(bench)]:
        progress.step(curve.title)
        try:
            curve.measure(ROUNDS, progress)
            drawn.append(curve)
        except JobFailed as error:
            failed[curve.title] = str(error)
    progress.step("a million operations")
    try:
        flat, flat_rows = million(bench, 100_000 if options.quick else 1_000_000)
    except JobFailed as error:
        failed["a million operations"] = str(error)
        return []
    drawn.append(flat)
    return flat_rows


def facts_of(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """The machine, the command, and the versions of tensorferry and fio."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return machine.facts(folder) | {
        "command": " ".join(["compare.py", *sys.argv[1:]]) + (" (quick)" if options.quick else ""),
        "tensorferry": first_line(head),
        "fio": first_line(["fio", "--version"]),
    }


def first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "not installed"
    return done.stdout.partition("\n")[0]


def check_room(options: argparse.Namespace) -> None:
    needed = SCRATCH_BYTES_QUICK if options.quick else SCRATCH_BYTES
    free = shutil.disk_usage(options.directory).free
    if free < needed:
        raise SystemExit(
            f"{options.directory} has {free / 1e9:.0f} GB free and compare needs "
            f"{needed / 1e9:.0f} GB: free some space, or choose another directory with --directory"
        )


def check_machine(earlier: dict[str, Any] | None, facts: dict[str, str]) -> None:
    if earlier and not results.same_machine(earlier["machine"], facts):
        raise SystemExit("the run to update is of another machine: see 'machine' in its file")


def check_fio() -> None:
    if shutil.which("fio") is None:
        raise SystemExit(
            "fio is not installed, and compare measures against it: apt-get install fio"
        )
    if not machine.may_lock(IN_FLIGHT_BYTES_MAX):
        print(
            "this user may not lock enough memory for all of fio's fixed buffers, so fio is slower "
            "with some settings: raise the limit with ulimit -l unlimited"
        )


def went_wrong(failed: dict[str, str], of_peers: set[str]) -> bool:
    """Whether a job failed that can run here: one of ours or of fio, but not of another peer."""
    return any(
        why.startswith(OURS)
        or (name not in of_peers and why != NO_TIME and not why.startswith(NOT_HERE))
        for name, why in failed.items()
    )


def main() -> int:
    options = arguments()
    before = earlier_run(options.against) if options.against else None
    earlier = earlier_run(options.update) if options.update else None
    # Measures the library's defaults: no profiles, no trace.
    for name in [name for name in os.environ if name.startswith("TENSORFERRY_")]:
        del os.environ[name]
    os.environ["TENSORFERRY_PROFILES"] = ""
    # A killed run also reports its pairs and removes its scratch files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    progress = Progress()
    peers = Peers(progress)
    drawn: list[Curve] = []
    flat_rows: list[Row] = []
    failed: dict[str, str] = {}
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compare-", dir=options.directory) as folder:
        bench = Bench(Path(folder), options.program, options.quick, progress)
        rows = all_rows(bench, peers, options)
        if not rows or options.list:
            print("\n".join(row.name for row in rows) or f"no row matches {options.rows}")
            return 0 if rows else 2
        check_room(options)
        check_fio()
        of_peers = {row.name for row in rows if row.peer}  # if the peer fails, the run says so
        facts = facts_of(Path(folder), options)
        check_machine(earlier, facts)
        try:
            bench.stored = stored_calibration(options, before or earlier, facts)
            progress("preparing files")
            bench.prepare()
            rows = with_peers(rows, peers)
            seconds_max = progress.seconds() + QUICK_SECONDS if options.quick else math.inf
            flat_rows = draw(drawn, bench, options, failed, progress)
            if options.quick:
                bench.settle()
            else:
                rows = rehearse(rows, failed, progress)
            measure(rows, pairs_wanted(rows, options), failed, progress, seconds_max)
        except JobFailed as error:  # before the first pair
            progress.end()
            print(f"a job failed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for end in bench.at_end:
                end()
        progress.end()
    rows = [row for row in rows + flat_rows if row.pairs]
    if rows:
        print(page.text_table(results.HEAD, results.table(rows), results.NUMBERS))
    left_out = {name: why for curve in drawn for name, why in curve.left_out.items()}
    for name, reason in (peers.missing | left_out | failed).items():
        print(f"not measured: {name}: {reason}")
    if not rows:
        return 130 if interrupted else 1
    print(results.summary(rows))
    found = results.write(rows, drawn, bench, peers, facts, left_out | failed, options)
    print(f"report: {options.output / 'compare.html'}, compare.md and compare.json beside it")
    if earlier:
        options.update.write_text(publish.compact(results.updated(earlier, found)))
        print(f"updated: {len(rows)} rows of {options.update}")
    if before and results.against(before, found, not options.rows and not interrupted):
        return 3
    return 130 if interrupted else 1 if went_wrong(failed, of_peers) else 0


if __name__ == "__main__":
    sys.exit(main())
