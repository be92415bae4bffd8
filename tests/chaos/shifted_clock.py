"""Runs a module with its wall clock shifted: `python -m tests.chaos.shifted_clock`, as after an NTP step.

The variables SHIFTED_MODULE and SHIFT_SECONDS name the module and the shift. Only `time.time` and `time.time_ns`
are shifted; the monotonic clock of a machine never decreases. gRPC keeps the real clock: its C code compares deadlines
with the real clock, and would consider each call of a shifted process an hour too late.
"""

import os
import runpy
import sys
import time
import types

import grpc.aio  # noqa: F401  all of its modules, so that they can be given the real clock


def main() -> None:
    """Shifts the clock, then becomes the module."""
    shift = int(float(os.environ.pop("SHIFT_SECONDS")) * 1e9)
    module = os.environ.pop("SHIFTED_MODULE")
    real = types.ModuleType("time")
    vars(real).update(vars(time))
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(loaded, "time", None) is time:
            loaded.time = real  # type: ignore[attr-defined]
    real_ns = time.time_ns
    time.time_ns = lambda: real_ns() + shift
    time.time = lambda: time.time_ns() / 1e9
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
