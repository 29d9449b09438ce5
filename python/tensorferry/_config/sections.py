"""The sections of a configuration: each key is checked when it is read, and unknown keys raise."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Sequence
from typing import Any

REQUIRED: Any = object()  # as a default: the key must be there


class ConfigError(ValueError):
    """A configuration that cannot be honoured. The message says where and what to do."""

    __module__ = "tensorferry"  # where users find it


class Section:
    """A part of the configuration. Reading a key checks it and marks it as known.

    Methods that take `names` read the first name or one of its aliases."""

    def __init__(self, values: Any, name: str, ignored: list[str]) -> None:
        """`name` is its path; machinery() adds keys to `ignored`."""
        if not isinstance(values, dict):
            raise ConfigError(f"{name or 'the configuration'} must be an object, got {values!r}")
        self._values = values
        self._name = name
        self._known: set[str] = set()
        self._ignored = ignored

    def path(self, key: object) -> str:
        """Returns the name of a key from the top of the configuration."""
        return f"{self._name}.{key}" if self._name else str(key)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def _get(self, names: str | Sequence[str], default: Any) -> tuple[str, Any]:
        """Returns the name that is given, and its value or the default."""
        names = (names,) if isinstance(names, str) else names
        self._known.update(names)
        given = [name for name in names if name in self._values]
        if len(given) > 1:
            first, second = self.path(given[0]), self.path(given[1])
            raise ConfigError(f"{first} and {second} are names of the same setting: keep one")
        if not given:
            if default is REQUIRED:
                raise ConfigError(f"{self.path(names[0])} is missing")
            return names[0], default
        value = self._values[given[0]]
        if value == "auto":
            raise ConfigError(
                f'{self.path(given[0])} is "auto", which the Hugging Face Trainer fills in: '
                "write the value"
            )
        return given[0], value

    def boolean(self, names: str | Sequence[str], default: Any) -> Any:
        name, value = self._get(names, default)
        if value is not default and not isinstance(value, bool):
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be true or false")
        return value

    def number(self, names: str | Sequence[str], default: Any, least: float | None = None) -> Any:
        name, value = self._get(names, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be a number")
        if value != value:
            raise ConfigError(f"{self.path(name)} is not a number")
        if least is not None and value < least:
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be at least {least}")
        return value

    def share(self, names: str | Sequence[str], default: Any) -> Any:
        """Reads a number from 0 to 1."""
        value = self.number(names, default, least=0)
        if value > 1:
            name, _ = self._get(names, default)
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be at most 1")
        return value

    def whole(
        self,
        names: str | Sequence[str],
        default: Any,
        least: float | None = None,
        most: float = math.inf,
    ) -> Any:
        value = self.number(names, default, least)
        name, _ = self._get(names, default)
        if value is not default and (math.isinf(value) or value != int(value)):
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be a whole number")
        if value is not default and value > most:
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be at most {most}")
        return value if value is default else int(value)

    def choice(self, names: str | Sequence[str], default: str, choices: Sequence[str]) -> str:
        name, value = self._get(names, default)
        if value is not default and value not in choices:
            raise ConfigError(
                f"{self.path(name)} is {value!r}: it must be one of {', '.join(map(str, choices))}"
            )
        return str(value)

    def like(self, name: str, default: object) -> Any:
        """Reads a setting of the same kind as `default`; None if it is not given."""
        if isinstance(default, bool):
            return self.boolean(name, None)
        if isinstance(default, (int, float)):
            return self.number(name, None)
        return self.anything(name)

    def numbers(self, name: str, default: Any) -> Any:
        """Reads a number or a list of numbers."""
        value = self.anything(name, default)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if value is not default and (isinstance(each, bool) or not _is_number(each)):
                raise ConfigError(
                    f"{self.path(name)} is {value!r}: it must be a number or a list of numbers"
                )
        return value

    def paths(self, name: str) -> Any:
        """Reads a path or a list of paths; None if it is not given."""
        value = self.anything(name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if value is not None and not isinstance(each, (str, os.PathLike)):
                raise ConfigError(
                    f"{self.path(name)} is {value!r}: it must be a path or a list of paths"
                )
        return value

    def anything(self, names: str | Sequence[str], default: Any = None) -> Any:
        return self._get(names, default)[1]

    def section(self, names: str | Sequence[str]) -> Section:
        """Returns a section below this one; an empty one if it is not given."""
        name, value = self._get(names, None)
        return Section({} if value is None else value, self.path(name), self._ignored)

    def optional_section(self, name: str) -> Section | None:
        """Returns a section below this one; None if it is not given."""
        return None if self.anything(name) is None else self.section(name)

    def refuse(self, key: str, unless: object, why: str) -> None:
        """Raises ConfigError if a key has another value than `unless`."""
        _, value = self._get(key, unless)
        if value != unless:
            raise ConfigError(f"{self.path(key)} is {value!r}: {why}")

    def machinery(self, *keys: str) -> None:
        """Ignores keys that only concern DeepSpeed's own machinery."""
        for key in keys:
            self._known.add(key)
            if key in self._values:
                self._ignored.append(self.path(key))

    def done(self) -> None:
        """Raises ConfigError if there are keys that nobody has read."""
        for key in self._values:
            if key in self._known:
                continue
            near = difflib.get_close_matches(str(key), self._known, n=1, cutoff=0.5)
            hint = f"; did you mean {self.path(near[0])}?" if near else ""
            raise ConfigError(f"{self.path(key)} is not a known key{hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value


def read(config: Any) -> dict[str, Any]:
    """Reads a configuration from a dict, a path or an open file."""
    if isinstance(config, dict):
        return config
    if hasattr(config, "read"):
        return _parse(config.read(), "the configuration")
    with open(os.fspath(config), encoding="utf-8") as file:
        return _parse(file.read(), os.fspath(config))


def _parse(text: str | bytes, name: str) -> dict[str, Any]:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{name}: the key {key!r} occurs twice")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must hold one JSON object")
    return values
