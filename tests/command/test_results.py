"""Results files have the form that docs/results.md and docs/results.schema.json give them."""

import copy
import json
import re
from pathlib import Path

import pytest

import examples

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "results.schema.json").read_text())
EXAMPLES = {
    "bench": examples.bench(samples=5),
    "bench-long": examples.bench(samples=1000, sizes=(4096,)),
    "bench-one": examples.bench(samples=1),
    "bench-empty": examples.bench(complete=False, series=[]),
    "sweep": examples.sweep(),
    "sweep-empty": examples.sweep(complete=False, points=[]),
    "tune": examples.tune(),
    "plan": examples.plan(),
    "tune-latency": examples.tune(objective="latency"),
}


def validate(results):
    """Raises jsonschema.ValidationError where results are not what the documents say."""
    jsonschema.Draft202012Validator(SCHEMA).validate(results)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid(name):
    validate(EXAMPLES[name])


def test_an_interrupted_tune_needs_no_best():
    results = copy.deepcopy(EXAMPLES["tune"]) | {"complete": False}
    del results["best"], results["default"], results["seconds"], results["profile"]
    validate(results)
    results["complete"] = True
    with pytest.raises(jsonschema.ValidationError):
        validate(results)


def without(*path):
    def change(results):
        for step in path[:-1]:
            results = results[step]
        del results[path[-1]]

    return change


def with_value(value, *path):
    def change(results):
        for step in path[:-1]:
            results = results[step]
        results[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "name, change",
    [
        ("bench", without("format")),
        ("bench", without("machine", "kernel")),
        ("bench", without("series")),
        ("bench", without("settings", "memory")),
        ("bench", without("series", 0, "latency_seconds", "p99")),
        ("bench", without("series", 3, "cold")),
        ("bench", with_value({"bytes": 1}, "series", 0, "cold")),
        ("bench", with_value([1.0], "series", 0, "latency_seconds", "ci95")),
        ("bench", with_value(None, "series", 0, "seconds", 2)),
        ("bench", with_value("copy", "series", 0, "direction")),
        ("bench", with_value(2, "version")),
        ("bench", with_value("yesterday", "started")),
        ("bench", with_value("tune", "command")),
        ("bench", with_value([], "points")),
        ("bench", with_value("nvme", "places", 0, "directory")),
        ("sweep", without("points", 0, "gb_per_second")),
        ("sweep", without("points", 0, "log")),
        ("sweep", with_value("failed", "points", 0, "status")),
        ("sweep", with_value(True, "points", 0, "overlap")),
        ("sweep", with_value(0, "points", 0, "queue_depth")),
        ("sweep", with_value("x", "points", 0, "surprise")),
        ("tune", without("rounds", 0, "candidates", 0, "kept")),
        ("tune", without("best", "gb_per_second")),
        ("tune", with_value(1e-4, "best", "latency_seconds")),
        ("tune", with_value("x", "rounds", 0, "candidates", 0, "surprise")),
        ("plan", without("choices", 0, "places", 0, "what")),
        ("plan", without("settings", "task", "parameters")),
        ("plan", with_value("luck", "choices", 0, "limit")),
        ("plan", with_value([1.0], "choices", 0, "step", 0, "read")),
        ("plan", with_value([], "choices")),
        ("tune", with_value("speed", "settings", "objective")),
    ],
)
def test_a_broken_one_is_not(name, change):
    results = copy.deepcopy(EXAMPLES[name])
    change(results)
    with pytest.raises(jsonschema.ValidationError):
        validate(results)


def names_in(schema):
    """All members that the schema names."""
    if isinstance(schema, list):
        for member in schema:
            yield from names_in(member)
    elif isinstance(schema, dict):
        yield from schema.get("properties", {})
        for member in schema.values():
            yield from names_in(member)


def test_the_page_names_every_member():
    text = (ROOT / "docs" / "results.md").read_text()
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert set(names_in(SCHEMA)) <= told
