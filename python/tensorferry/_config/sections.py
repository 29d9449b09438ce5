"""The sections of a configuration: keys that are read once, checked, and named when unknown."""

import difflib
import json
import math
import os

REQUIRED = object()


class ConfigError(ValueError):
    """A configuration that cannot be honoured. Says where and what to do."""

    __module__ = "tensorferry"  # where users find it


class Section:
    """A part of the configuration. Reading a key checks it and marks it as known."""

    def __init__(self, values, name, ignored):
        if not isinstance(values, dict):
            raise ConfigError(f"{name or 'the configuration'} must be an object, not {values!r}")
        self._values = values
        self._name = name
        self._known = set()
        self._ignored = ignored

    def path(self, key):
        return f"{self._name}.{key}" if self._name else key

    def __contains__(self, key):
        return key in self._values

    def _get(self, names, default):
        names = (names,) if isinstance(names, str) else names
        self._known.update(names)
        given = [name for name in names if name in self._values]
        if len(given) > 1:
            first, second = self.path(given[0]), self.path(given[1])
            raise ConfigError(f"{first} and {second} say the same: keep one")
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

    def boolean(self, names, default):
        name, value = self._get(names, default)
        if value is not default and not isinstance(value, bool):
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be true or false")
        return value

    def number(self, names, default, least=None):
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

    def whole(self, names, default, least=None, most=math.inf):
        value = self.number(names, default, least)
        name, _ = self._get(names, default)
        if value is not default and (math.isinf(value) or value != int(value)):
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be a whole number")
        if value is not default and value > most:
            raise ConfigError(f"{self.path(name)} is {value!r}: it must be at most {most}")
        return value if value is default else int(value)

    def choice(self, names, default, choices):
        name, value = self._get(names, default)
        if value is not default and value not in choices:
            raise ConfigError(
                f"{self.path(name)} is {value!r}: it must be one of {', '.join(map(str, choices))}"
            )
        return value

    def like(self, name, default):
        """A setting of the kind that `default` is; None where it is not there."""
        if isinstance(default, bool):
            return self.boolean(name, None)
        if isinstance(default, (int, float)):
            return self.number(name, None)
        return self.anything(name)

    def numbers(self, name, default):
        """A number or a list of them."""
        value = self.anything(name, default)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if value is not default and (isinstance(each, bool) or not _is_number(each)):
                raise ConfigError(f"{self.path(name)} is {value!r}: numbers are wanted")
        return value

    def paths(self, name):
        """A path or a list of them."""
        value = self.anything(name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if value is not None and not isinstance(each, (str, os.PathLike)):
                raise ConfigError(f"{self.path(name)} is {value!r}: it must be a path or several")
        return value

    def anything(self, names, default=None):
        return self._get(names, default)[1]

    def section(self, names, default=None):
        """A section below this one; None where it is not there and has no default."""
        name, value = self._get(names, None)
        if value is None:
            return None if default is None else Section(default, self.path(name), self._ignored)
        return Section(value, self.path(name), self._ignored)

    def refuse(self, key, unless, why):
        """A key that would change numbers, and has but one value that does not."""
        _, value = self._get(key, unless)
        if value != unless:
            raise ConfigError(f"{self.path(key)} is {value!r}: {why}")

    def machinery(self, *keys):
        """Keys that concern DeepSpeed's own machinery alone."""
        for key in keys:
            self._known.add(key)
            if key in self._values:
                self._ignored.append(self.path(key))

    def done(self):
        """All keys have been read by now: what is left is unknown."""
        for key in self._values:
            if key in self._known:
                continue
            near = difflib.get_close_matches(str(key), self._known, n=1, cutoff=0.5)
            hint = f"; did you mean {self.path(near[0])}?" if near else ""
            raise ConfigError(f"{self.path(key)} is not known{hint}")


def _is_number(value):
    return isinstance(value, (int, float)) and value == value


def read(config):
    """A configuration given as dict, path or open file."""
    if isinstance(config, dict):
        return config
    if hasattr(config, "read"):
        return _parse(config.read(), "the configuration")
    with open(os.fspath(config), encoding="utf-8") as file:
        return _parse(file.read(), os.fspath(config))


def _parse(text, name):
    def no_repeats(pairs):
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{name}: the key {key!r} is there twice")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must hold one object")
    return values
