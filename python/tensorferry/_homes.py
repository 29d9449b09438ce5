"""Where the values of a parameter are, when they are not in memory."""

from torch.utils.weak import WeakTensorKeyDictionary

_homes = WeakTensorKeyDictionary()


def home_of(param):
    """The Home of a parameter whose values are on the drive; None where they are in memory."""
    return _homes.get(param)


def give_home(param, home):
    _homes[param] = home
