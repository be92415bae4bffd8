"""What the stack costs and gains, measured."""

from pathlib import Path

# What was measured, as JSON and as pictures, beside the pages that tell of it.
RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
