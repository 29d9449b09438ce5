"""Where the command is that was built."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TENSORFERRY_BUILD_DIR", ROOT / "build" / "release"))
PROGRAM = BUILD / "bin" / "tensorferry"
