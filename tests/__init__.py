"""Tests, and what benchmarks share with them."""

import sys
from pathlib import Path

# The scripts there are no package: PyPI has one of that name.
sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))
