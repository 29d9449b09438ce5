"""python -m tensorferry.report"""

import sys

from .program import main

sys.exit(main())
