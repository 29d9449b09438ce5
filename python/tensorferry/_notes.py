"""Notes on exceptions."""

import logging


def add_note(error, text):
    """error.add_note(text); a warning in the log where Python has none (3.10)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.getLogger("tensorferry").warning("%s: %s", error, text)
