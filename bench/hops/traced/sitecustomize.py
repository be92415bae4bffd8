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

# Calls: nanoseconds of the monotonic clock, thread, depth of the stack, file in the checkout, function.
_calls: list[tuple[int, int, int, str, str]] | None = None


def _note(frame: FrameType, event: str, _argument: object) -> None:
    code = frame.f_code
    if event != "call" or _calls is None or not code.co_filename.startswith(_PRODUCTS):
        return
    # The argument of RESUME is 0 at the start of a function, and more if a coroutine continues.
    if code.co_flags & _CAN_WAIT and code.co_code[frame.f_lasti + 1] & 3:
        return
    depth, outer = 0, frame.f_back
    while outer is not None:
        depth, outer = depth + 1, outer.f_back
    file = code.co_filename.removeprefix(_ROOT)
    _calls.append((time.monotonic_ns(), threading.get_ident(), depth, file, code.co_qualname))


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
