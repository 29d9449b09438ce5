"""`tensorferry report`: the page is opened in a real browser, which must have nothing to complain
of; what it holds is read from the document after the plots are drawn."""

import copy
import html
import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from browser import Browser

import examples

pytest.importorskip("plotly")
report = pytest.importorskip("tensorferry.report")

HOSTILE = (
    "</script><script>alert(1)</script><img src=http://x.test/ onerror=alert(2)>\"'&$%{x}\u2028"
)
PLOTS = {
    "bench": {
        f"run-1-{name}"
        for name in (
            "bandwidth",
            "histogram-read",
            "histogram-write",
            "percentiles-read",
            "percentiles-write",
            "time-read",
            "time-write",
        )
    },
    "sweep": {
        f"run-1-{name}"
        for name in (
            "map-read-0",
            "map-read-1",
            "map-write-0",
            "map-write-1",
            "workers-read",
            "workers-write",
        )
    },
    "tune": {"run-1-path"},
    "plan": {f"run-1-{name}-{i}" for name in ("places", "step") for i in range(3)}
    | {"run-1-drives", "run-1-life"},
}


class Document(HTMLParser):
    """What the tests ask of a page: its text, its ids, what it links to, which plots are drawn."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.drawn, self.tags, self.words = set(), [], set(), [], []
        self.labels = {}
        self._plot = self._silent = None
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag in ("script", "style"):
            self._silent = tag
        if "id" in attributes:
            self.ids.add(attributes["id"])
        if attributes.get("role") == "img" and "id" in attributes:
            self._plot = attributes["id"]
            self.labels[self._plot] = attributes.get("aria-label", "")
        if "main-svg" in (attributes.get("class") or "").split() and self._plot:
            self.drawn.add(self._plot)
        self.links += [
            (tag, value)
            for name, value in attributes.items()
            if name in ("src", "href", "xlink:href", "action", "srcset", "poster")
        ]

    def handle_endtag(self, tag):
        if tag == self._silent:
            self._silent = None

    def handle_data(self, data):
        if not self._silent:
            self.words.append(data)


@pytest.fixture
def make(tmp_path):
    """make(results, ...) returns the page's path; each of them is a file r0.json, r1.json, ..."""

    def page(*all_results, names=None):
        paths = []
        for index, results in enumerate(all_results):
            path = tmp_path / (names[index] if names else f"r{index}.json")
            path.write_text(json.dumps(results))
            paths.append(str(path))
        output = tmp_path / "report.html"
        assert report.main([*paths, "-o", str(output)]) == 0
        return output

    return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if not program:
        pytest.skip("no chromium here")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser):
    """opened(path) is the Document after its scripts ran; anything in the console is a failure."""

    def look(path, *settings):
        document, said = browser.open(path.as_uri(), *settings)
        assert not said, said
        return Document(document)

    return look


@pytest.mark.parametrize(
    "script",
    [
        "console.error('a')",
        "console.log('a')",
        "throw 1",
        "document.write('<img src=x>')",
        "setTimeout(() => { throw 1 }, 9000)",
    ],
)
def test_a_planted_complaint_is_found(opened, tmp_path, script):
    page = tmp_path / "page.html"
    page.write_text("<title>ok</title>")
    assert opened(page).text == "ok"
    page.write_text(f"<script>{script}</script>")
    with pytest.raises(AssertionError):
        opened(page)


@pytest.mark.parametrize("command", PLOTS)
def test_every_plot_is_drawn(make, opened, command):
    document = opened(make(getattr(examples, command)()))
    assert document.drawn == PLOTS[command]
    assert all(len(label) > 40 for label in document.labels.values())


def test_runs_of_one_command_are_compared(make, opened):
    page = make(
        examples.bench(),
        examples.bench(seed=7),
        examples.bench(seed=8, speed=1.5),
        names=["before.json", "again.json", "after.json"],
    )
    document = opened(page)
    assert {"compare-bench-read", "compare-bench-write", "run-3-bandwidth"} <= document.drawn
    # The same drive measured twice is even, a quicker one is not.
    assert re.search(r"again\.json [\d.]+ [\d. to]+ [\d.]+ [\d. to]+ even", document.text)
    assert re.search(r"after\.json [\d.]+ [\d. to]+ 1\.[3-6]\d* [\d. to]+ faster", document.text)


def test_sweeps_and_tunes_are_compared_too(make, opened):
    document = opened(
        make(
            examples.sweep(),
            examples.sweep(speed=0.5),
            examples.tune(),
            examples.tune(speed=1.3),
            examples.bench(),
        )
    )
    assert {"compare-sweep-read", "compare-sweep-write"} <= document.drawn
    assert re.search(r"r1\.json [\d.]+ [\d. to]+ 0\.5\d* [\d. to]+ slower", document.text)
    assert re.search(r"r3\.json read [\d.]+ GB/s 1\.[23]\d* [\d. to]+ faster", document.text)
    assert "compare-bench" not in document.ids


def test_without_intervals_nothing_is_called_faster(make):
    for slow, quick in (
        (examples.bench(samples=1), examples.bench(samples=1, speed=3)),
        (examples.sweep(loops=1), examples.sweep(loops=1, speed=3)),
    ):
        text = Document(make(slow, quick).read_text()).text
        assert "no interval, so not known" in text
        assert not re.search(r"\bfaster\b(?!\.)", text)


def test_the_page_has_what_was_measured(make):
    results = examples.bench()
    document = Document(make(results).read_text())
    for text in (
        "Samsung SSD 990 PRO 2TB (nvme0n1)",
        "ferry-01",
        "15 November 2026, 10:52 UTC",
        "registered buffers and files",
        "the drive counted as many bytes",
        "0.0810",
    ):
        assert text in document.text
    for one in results["series"]:
        assert f"{one['latency_seconds']['mean'] * 1e3:.3g}" in document.text


def test_failed_points_are_listed(make):
    document = Document(make(examples.sweep()).read_text())
    assert "192 points measured, 6 failed" in document.text
    assert document.text.count("No space left on device") == 6


def test_the_tuner_s_setting_can_be_copied(make):
    results = examples.tune()
    (block,) = re.findall(r"<pre[^>]*>(.*?)</pre>", make(results).read_text(), re.DOTALL)
    aio = json.loads(html.unescape(block))["aio"]
    best = results["best"]
    assert (aio["block_size"], aio["queue_depth"], aio["intra_op_parallelism"]) == (
        best["block_bytes"],
        best["queue_depth"],
        best["workers"],
    )
    assert aio["overlap_events"] is True and aio["single_submit"] is False


def test_an_interrupted_run_says_so(make):
    assert "interrupted" not in make(examples.bench()).read_text().split("<script")[0]
    page = make(examples.bench(complete=False)).read_text()
    assert "This run was interrupted" in page


def test_plotly_is_there_once_and_nothing_is_fetched(make, opened):
    page = make(examples.bench(), examples.sweep(), examples.tune())
    assert page.read_text().count("* plotly.js v") == 1
    document = opened(page)
    assert [link for link in document.links if not link[1].startswith(("#", "data:"))] == []
    assert not {"link", "iframe", "object", "embed", "base"} & set(document.tags)
    assert "default-src 'none'" in page.read_text()


@pytest.mark.parametrize(
    "scheme, paper",
    [("dark", "20, 23, 26"), ("light", "251, 251, 249")],
    ids=["dark", "light"],
)
def test_plots_follow_the_colour_scheme(make, opened, scheme, paper, tmp_path):
    page = make(examples.tune())
    # The colour of the page and of the lines in its plots, as the browser has worked them out.
    probe = (
        "<script>addEventListener('load', () => { document.title = "
        "getComputedStyle(document.body).backgroundColor + ' ' + "
        "getComputedStyle(document.querySelector('.gridlayer path')).stroke })</script>"
    )
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', probe, page.read_text())
    (tmp_path / "probe.html").write_text(text)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    setting = "Emulation.setEmulatedMedia", {"features": features}
    document = opened(tmp_path / "probe.html", setting)
    grid = {"dark": "42, 47, 53", "light": "235, 236, 232"}[scheme]
    assert f"rgb({paper}) rgb({grid})" in document.text


def test_plots_change_when_the_colour_scheme_does(make, opened, tmp_path):
    page = make(examples.tune())
    # Stands for the system's scheme: dark, and the page is told so after the first drawing.
    probe = """<script>
    let told; const real = window.matchMedia.bind(window);
    window.matchMedia = (query) => query.includes("dark")
      ? { matches: true, addEventListener: (_, listener) => { told = listener; } } : real(query);
    addEventListener("load", () => {
      document.documentElement.style.setProperty("--grid", "#010203");
      told();
      document.title = getComputedStyle(document.querySelector(".gridlayer path")).stroke;
    });</script>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', probe, page.read_text())
    (tmp_path / "probe.html").write_text(text)
    assert "rgb(1, 2, 3)" in opened(tmp_path / "probe.html").text


@pytest.mark.parametrize("command", PLOTS)
def test_the_page_is_as_wide_as_a_phone(make, opened, command, tmp_path):
    results = getattr(examples, command)()
    results["machine"]["host"] = "x" * 200
    page = make(results, results)
    probe = (
        "<script>addEventListener('load', () => parent.postMessage("
        "document.documentElement.scrollWidth + ' of ' + innerWidth, '*'))</script>"
    )
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', probe, page.read_text())
    (tmp_path / "probe.html").write_text(text)
    # A window has a least width; a frame has none.
    (tmp_path / "phone.html").write_text(
        "<script>onmessage = (event) => document.title = event.data</script>"
        "<iframe src=probe.html style='width: 360px; height: 800px; border: 0'></iframe>"
    )
    setting = "Emulation.setScrollbarsHidden", {"hidden": True}
    assert "360 of 360" in opened(tmp_path / "phone.html", setting).text


def spoil(value):
    """The same results, with a hostile text in place of each that may be any."""
    kept = (
        "read",
        "write",
        "ok",
        "failed",
        "overlap",
        "sequential",
        "bench",
        "sweep",
        "tune",
        "plan",
        "tensorferry-results",
    )
    if isinstance(value, dict):
        return {name: spoil(member) for name, member in value.items()}
    if isinstance(value, list):
        return [spoil(member) for member in value]
    return HOSTILE if isinstance(value, str) and value not in kept else value


@pytest.mark.parametrize("command", PLOTS)
def test_hostile_texts_stay_texts(make, opened, command):
    calm = getattr(examples, command)()
    results = spoil(copy.deepcopy(calm))
    name = "<img src=x onerror=alert(3)>&.json"
    page = make(results, results, calm, names=["plain.json", name, "calm.json"])
    document = opened(page)
    assert {"img", "iframe"} & set(document.tags) == set()
    assert document.tags.count("script") == 3
    assert name in document.text and "alert(1)" in document.text
    assert len(document.drawn) == len(document.labels)


def test_no_text_leaves_the_data_of_the_plots():
    from tensorferry.report.page import Page

    page = Page()
    page.plot("x", "", "", [{"name": HOSTILE, "y": [1.0, float("nan"), float("-inf")]}], {})
    text = page.document("", "", "")
    assert "alert" not in re.sub(r'id="plots">.*?</script>', "", text)
    (trace,) = json.loads(re.search(r'id="plots">(.*?)</script>', text)[1])["x"]["data"]
    assert trace == {"name": HOSTILE, "y": [1.0, None, None]}


def test_half_a_character_does_not_spoil_the_page(make):
    results = examples.bench(samples=3)
    results["machine"]["host"] = "\ud800"
    assert "<title>" in make(results).read_text()


def test_one_operation_has_no_interval_and_is_shown(make):
    results = examples.bench(samples=1)
    for one in results["series"]:
        for member in ("latency_seconds", "bandwidth_mb_per_second"):
            one[member].pop("ci95", None)
    assert "<title>" in make(results).read_text()


def test_a_long_run_is_thinned_and_says_so(make, opened):
    results = examples.bench(samples=100_000, sizes=(1 << 20,))
    slowest = max(results["series"][1]["seconds"])
    page = make(results)
    assert "of 100,000 operations are drawn" in page.read_text()
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page.read_text())[1])
    (trace,) = plots["run-1-time-read"]["data"]
    assert 1000 < len(trace["x"]) <= 2000
    assert max(trace["y"]) == pytest.approx(slowest * 1e6)
    assert page.stat().st_size < 6e6
    assert opened(page).drawn == PLOTS["bench"]


def nothing_but_nan(results):
    for one in results["series"]:
        one["seconds"] = [float("nan")] * 3
        for member in ("latency_seconds", "bandwidth_mb_per_second"):
            one[member] = dict.fromkeys(one[member]) | {"ci95": [None, float("inf")]}
    return results


def some_nan(results):
    results["series"][0]["seconds"][1] = None
    results["series"][0]["seconds"][2] = float("nan")
    results["series"][1]["seconds"][0] = 0
    results["series"][2]["started_seconds"] = []
    return results


def all_failed(results):
    for one in results["points"]:
        if one["status"] == "ok":
            examples.fail(one)
    return results


def unknown_scores(results):
    for one in results["rounds"][0]["candidates"]:
        one |= {"score": None, "low": None, "high": float("inf")}
    return results


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(examples.bench(samples=1), id="one-sample"),
        pytest.param(examples.bench(series=[], complete=False), id="no-series"),
        pytest.param(nothing_but_nan(examples.bench(samples=3)), id="nothing-but-nan"),
        pytest.param(some_nan(examples.bench(samples=5)), id="some-nan"),
        pytest.param(examples.sweep(points=[], complete=False), id="no-points"),
        pytest.param(all_failed(examples.sweep()), id="all-failed"),
        pytest.param(examples.sweep(workers=(1,), loops=1), id="one-worker"),
        pytest.param(
            examples.sweep(engines=("io_uring", "threads"), directories=("/a", "/b")),
            id="engines-and-directories",
        ),
        pytest.param(
            examples.tune(rounds=[], best=None, default=None, complete=False), id="no-rounds"
        ),
        pytest.param(unknown_scores(examples.tune()), id="unknown-scores"),
        pytest.param(examples.tune(objective="latency"), id="latency"),
        pytest.param(examples.bench(places=[], machine={}, settings={}), id="unknown-machine"),
    ],
)
def test_odd_results_make_a_page(make, opened, results):
    document = opened(make(results, results))
    assert len(document.drawn) == len(document.labels)


def changed(**members):
    return json.dumps(examples.bench(samples=2) | members)


@pytest.mark.parametrize(
    "text, said",
    [
        ("not json", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\x00\xff", "not JSON"),
        ("[1, 2]", "no name, ts and dur"),
        ('{"traceEvents": []}', "not results"),
        (changed(version=2), "update tensorferry"),
        (changed(version="1"), "update tensorferry"),
        (changed(command="dance"), "unknown command"),
        (changed(series={}), "series is not a list"),
        (changed(series=[{}]), "series[0].direction is missing"),
        (changed(places=None), "places is not a list"),
        (changed(complete="yes"), "complete is not true or false"),
    ],
)
def test_a_wrong_file_is_one_line_and_no_page(tmp_path, capsys, text, said):
    path, output = tmp_path / "r.json", tmp_path / "report.html"
    path.write_text(text, encoding="latin-1")
    assert report.main([str(path), "-o", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"tensorferry report: {path}: ") and error.count("\n") == 1
    assert said in error
    assert not output.exists()


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(examples.bench(samples=2)))
    assert report.main([str(path), "-o", str(tmp_path / "no" / "report.html")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["r.json"]


def test_results_are_never_overwritten(tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(examples.bench(samples=2)))
    (tmp_path / "link").symlink_to(path)
    assert report.main([str(path), "-o", str(tmp_path / "link")]) == 1
    assert "holds results" in capsys.readouterr().err
    assert json.loads(path.read_text())["command"] == "bench"


def test_a_page_is_replaced_with_its_permissions(make, tmp_path):
    page = make(examples.bench(samples=2))
    page.chmod(0o640)
    assert page.stat().st_ino != make(examples.tune()).stat().st_ino
    assert page.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["r0.json", "report.html"]


def test_what_lies_beside_a_page_is_neither_written_nor_followed(make, tmp_path):
    (tmp_path / "precious").write_text("precious")
    # The name that was once used for what is not finished.
    planted = tmp_path / f"report.html.new-{os.getpid()}"
    planted.symlink_to(tmp_path / "precious")
    make(examples.bench(samples=2))
    assert (tmp_path / "precious").read_text() == "precious" and planted.is_symlink()


def test_the_command_makes_the_page(ferry):
    (ferry.place / "r.json").write_text(json.dumps(examples.sweep()))
    done = ferry("report", "r.json", "-o", "page.html")
    assert done.stdout == "Report: page.html (1 run)\n"
    assert Document((ferry.place / "page.html").read_text()).labels.keys() == PLOTS["sweep"]


# --- traces of training ---


def event(name, begin, end, kind="work"):
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": 1, "ts": begin * 1e3,
            "dur": (end - begin) * 1e3, "args": {}}  # fmt: skip


# Two iterations, in milliseconds. In the second, of 100, computation waits 20 for the drive and 5
# for copies, inside a wait for room; it steps 15. The drive works 40 in all.
TRACE = [
    event("iteration", 0, 900),
    event("iteration", 900, 1000),
    event("backward pass", 920, 960),
    event("optimizer step", 960, 1000),
    event("AdamW step", 930, 940),
    event("AdamW step", 970, 975),
    event("wait for states", 960, 970),
    event("wait for room", 980, 995),
    event("wait for copies", 985, 990),
    event("read 1 MiB", 890, 920, "operation"),
    event("read 1 MiB", 910, 930, "operation"),
    event("write 1 MiB", 990, 1010, "operation"),
    event("read", 940, 941, "request"),
]


def test_a_trace_shows_who_waited_for_whom(make, opened):
    page = opened(make(TRACE, names=["trace.json"]))
    assert page.drawn == {"run-1-waits", "run-1-timeline"}
    assert "2 iterations" in page.text and "trace.json" in page.text
    said = page.labels["run-1-waits"].replace("\u00a0", " ")
    for words in (
        "Two bars of 100.0 ms",
        "Computation computes the model 60.0 ms",
        "Computation steps 15.0 ms",
        "Computation waits for the drive 20.0 ms",
        "Computation waits for copies 5.00 ms",
        "Drive reads and writes 40.0 ms",
        "Drive waits for computation 60.0 ms",
    ):
        assert words in said, said
    said = page.labels["run-1-timeline"].replace("\u00a0", " ")
    assert "Drive reads 30.0 ms; Drive writes 10.0 ms" in said


def test_a_trace_without_iterations_is_shown_as_one(make, opened):
    events = [event("read 1 MiB", 10, 30, "operation"), event("wait for weights", 20, 40)]
    page = opened(make(events, TRACE))
    assert "1 iteration" in page.text and "2 runs" in page.text
    assert {"run-1-waits", "run-2-waits"} <= page.drawn


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no operation and no step"),
        ([event("iteration", 0, 1)], "no operation and no step"),
        ([{"name": "read", "cat": "operation", "ts": 1}], "event 0 has no name, ts and dur"),
        ([*TRACE, 7], f"event {len(TRACE)} has no name"),
    ],
)
def test_a_list_that_is_no_trace_of_training_is_one_line(tmp_path, capsys, events, said):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    assert report.main([str(path), "-o", str(tmp_path / "report.html")]) == 1
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["trace.json"]


def test_the_command_passes_the_error_on(ferry):
    (ferry.place / "r.json").write_text("{}")
    assert "r.json: not results" in ferry("report", "r.json", code=1).stderr
