"""python -m tensorferry.snapshot"""

import sys

from .program import main

sys.exit(main())
