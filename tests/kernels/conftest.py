"""The backend of a kernel test: the torch path, Triton's interpreter, a GPU.

Triton reads TRITON_INTERPRET when a kernel is decorated, for good. The interpreter and the compiler therefore live in
processes of their own, and this one is left as it was found.
"""

import ctypes
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.kernels.decoder_cases import compiled_decoder, decoder_for
from tests.stack import model_cache

Submit = Callable[..., Any]


def _worker(environment: dict[str, str]) -> Iterator[Submit]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            # The process starts, with this environment, on its first piece of work.
            pool.submit(_prepare).result()
        yield lambda function, *args: pool.submit(function, *args).result()


def _prepare() -> None:
    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1":
        round_to_nearest()


def round_to_nearest() -> None:
    """Lets torch convert floats for the interpreter, which cuts off the bits that a device rounds."""
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def convert(data: Any, source: Any, target: Any, _rounding: Any) -> Any:
        bits = torch.from_numpy(data.copy()).view(integers[source.primitive_bitwidth // 8])
        return bits.view(types[source]).to(types[target]).view(integers[target.primitive_bitwidth // 8]).numpy()

    triton_interpreter._convert_float = convert


@pytest.fixture(scope="session", params=["native", "8 lanes"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The compiled decoder: with all that the processor has, and as for one that has AVX2 only."""
    native = compiled_decoder(model_cache() / "compiled")
    if request.param == "native":
        return native
    if native.decoder_width() == 8:
        pytest.skip("the native decoder has 8 lanes, too")
    return decoder_for(8, model_cache() / "compiled")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Submit]:
    yield from _worker({"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submit]:
    cache = tmp_path_factory.mktemp("triton-cache")
    yield from _worker({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)})


@pytest.fixture(params=["torch", "interpreter", "cuda"])
def run_on(request: pytest.FixtureRequest) -> Submit:
    """Calls function(backend, *args) on the backend's device, and returns the result."""
    backend = request.param
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    submit = request.getfixturevalue("interpreter") if backend == "interpreter" else _call
    return lambda function, *args: submit(function, backend, *args)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
