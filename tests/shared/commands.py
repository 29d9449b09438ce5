"""The commands of the program."""

COMMANDS = (
    "bench",
    "sweep",
    "point",
    "tune",
    "doctor",
    "verify",
    "checkpoint",
    "snapshot",
    "report",
    "completion",
)
