"""Notes on exceptions."""

import logging


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an exception. Python 3.10 has no notes: there, logs a warning."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.getLogger("tensorferry").warning("%s: %s", error, text)
