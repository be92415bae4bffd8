"""Records every call of a product's function in this process, and writes the calls to a file on request.

Python imports this module at its start if this folder is in PYTHONPATH. TRACED_ROOT: the checkout. TRACED_FOLDER: the
folder for the calls. The first SIGUSR2 begins the recording, the second writes `PID.json`.
"""

import inspect
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

_ROOT = os.environ["TRACED_ROOT"] + os.sep
_PRODUCTS = tuple(f"{_ROOT}{name}{os.sep}" for name in ("cachemgr", "scheduler", "executor", "protos", "kernels"))
_CAN_WAIT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# Calls: nanoseconds of the monotonic clock, index of the call of the product that called, -1 for none, file in the
# checkout, function.
_calls: list[tuple[int, int, str, str]] | None = None
# The index of each call by the id of its frame. An id that is used again is that of a later call.
_indices: dict[int, int] = {}
_lock = threading.Lock()


def _note(frame: FrameType, event: str, _argument: object) -> None:
    code, calls = frame.f_code, _calls
    if event != "call" or calls is None or not code.co_filename.startswith(_PRODUCTS):
        return
    # The argument of RESUME is 0 at the start of a function, and more if a coroutine continues.
    if code.co_flags & _CAN_WAIT and code.co_code[frame.f_lasti + 1] & 3:
        return
    outer = frame.f_back
    while outer is not None and not (outer.f_code.co_filename.startswith(_PRODUCTS) and id(outer) in _indices):
        outer = outer.f_back
    caller = -1 if outer is None else _indices[id(outer)]
    # No other thread may append between the two statements.
    with _lock:
        _indices[id(frame)] = len(calls)
        calls.append((time.monotonic_ns(), caller, code.co_filename.removeprefix(_ROOT), code.co_qualname))


def _toggle(_number: int, _frame: FrameType | None) -> None:
    global _calls
    if _calls is None:
        _calls = []
        return
    calls, _calls = _calls, None
    target = Path(os.environ["TRACED_FOLDER"]) / f"{os.getpid()}.json"
    target.with_suffix(".part").write_text(json.dumps(calls))
    target.with_suffix(".part").rename(target)


signal.signal(signal.SIGUSR2, _toggle)
threading.setprofile(_note)
sys.setprofile(_note)
