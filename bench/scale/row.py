"""One measurement at scale."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`value` in `unit`; `target` is its upper limit, None if it is only reported."""

    name: str
    value: float
    unit: str
    target: float | None = None

    def show(self) -> None:
        """Prints a line of the table."""
        bound = "" if self.target is None else f"<= {self.target:g}"
        verdict = "" if self.target is None else "met" if self.value <= self.target else "MISSED"
        print(f"{self.name:<64}{self.value:>12,.3f} {self.unit:<8}{bound:>10}  {verdict}", flush=True)
