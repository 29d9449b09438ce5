"""The commands of the program."""

COMMANDS = (
    "bench",
    "sweep",
    "point",
    "tune",
    "doctor",
    "plan",
    "verify",
    "checkpoint",
    "snapshot",
    "report",
    "completion",
)
