"""python -m tensorferry.inspection"""

import sys

from .program import main

sys.exit(main())
