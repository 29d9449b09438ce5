"""`python -m tensorferry.plan`: what `tensorferry plan --check` runs."""

import sys

from .program import main

sys.exit(main(sys.argv[1:]))
