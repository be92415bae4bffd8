"""llama.cpp's own measurement of a single stream, without server, sampling or client, for comparison with W4."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.peers.processes import PeerError
from bench.peers.set_up import peer_environment
from bench.workloads import Case


def token_ms(program: Path, file: Path, dtype: str, threads: int, case: Case) -> float:
    """Mean milliseconds per output token after a prompt of the case's length. Raises PeerError."""
    # llama-bench takes no float32 for K and V, which are a hundredth of the bytes read here.
    kept = {"float32": "f16", "bfloat16": "bf16"}[dtype]
    command = [str(program), "--model", str(file), "--threads", str(threads), "--output", "json"]
    command += ["--cache-type-k", kept, "--cache-type-v", kept, "--repetitions", "1"]
    (prompt,) = case.prompt_tokens
    command += ["--n-prompt", "0", "--n-depth", str(prompt), "--n-gen", str(case.output_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=peer_environment(), check=False)
    if done.returncode:
        raise PeerError(f"llama-bench: {done.stderr.strip().splitlines()[-1:]}")
    (measured,) = json.loads(done.stdout)
    return float(measured["avg_ns"]) / 1e6 / case.output_tokens
