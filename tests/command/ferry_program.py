"""Where the command is that was built."""

import os
import sys
from pathlib import Path

from warm_python import WARM_FOLDER

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TENSORFERRY_BUILD_DIR", ROOT / "build" / "release"))
PROGRAM = BUILD / "bin" / "tensorferry"
# The command finds the package as it was built, and a Python that has imported torch.
WITH_PACKAGE = os.environ | {
    "PYTHONPATH": str(BUILD / "python"),
    "PATH": f"{WARM_FOLDER}:{Path(sys.executable).parent}:{os.environ['PATH']}",
}
