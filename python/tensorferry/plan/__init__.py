"""What the parts of a step cost on this machine, for `tensorferry plan --check`."""

from __future__ import annotations

from .costs import drive_costs, pass_costs, step_costs
from .program import main

__all__ = ["drive_costs", "main", "pass_costs", "step_costs"]
