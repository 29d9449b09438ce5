"""`tensorferry report`: results files in, one HTML page out.

    tensorferry report before.json after.json -o report.html

The page holds all it needs, plotly.js too, and asks nobody for anything. docs/results.md describes
the files. Needs plotly: `pip install '.[report]'` in a checkout.
"""

from .document import make_page
from .program import main
from .results import Unusable, load

__all__ = ["Unusable", "load", "main", "make_page"]
