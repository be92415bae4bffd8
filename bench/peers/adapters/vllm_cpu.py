"""vLLM on a CPU, its engine loop in this process: all requests are added, then steps run until none is left."""

import itertools
import os
import sys
import time
from pathlib import Path

import jobs

# Bound to every core: by default one core is left to other processes, which halves the speed on two cores.
CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
ENVIRONMENT = {
    # GB: only as much as the longest workload needs in float32, because all engines stay loaded together.
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": CORES,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# The allocator and the OpenMP library that vLLM's makers advise, if they are found.
PRELOADED = (
    Path("/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    Path(sys.prefix, "lib/libiomp5.so"),
)


def preload() -> None:
    """Restarts this program with its libraries preloaded; does nothing after the restart."""
    if "LD_PRELOAD" in os.environ:
        return
    found = list({path.name: str(path) for path in PRELOADED if path.exists()}.values())
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT, "LD_PRELOAD": ":".join(found)})


def main() -> None:
    """Runs jobs."""
    preload()
    answers = jobs.answers()
    model, dtype, _, _ = jobs.arguments()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, dtype=dtype, max_model_len=2048, enable_prefix_caching=True, disable_log_stats=True)
    )
    numbers = itertools.count()

    def run(job: jobs.Job) -> jobs.Outcome:
        names = [str(next(numbers)) for _ in job.prompts]
        begin = time.monotonic()
        for name, prompt in zip(names, job.prompts, strict=True):
            sampling = vllm.SamplingParams(
                temperature=0,
                max_tokens=job.output_tokens,
                ignore_eos=True,
                detokenize=False,
                skip_reading_prefix_cache=not job.reuse,
            )
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        times: dict[str, list[float]] = {name: [] for name in names}
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                seen = times[output.request_id]
                seen += [time.monotonic() - begin] * (len(tokens[output.request_id]) - len(seen))
        return [times[name] for name in names], [tokens[name] for name in names]

    jobs.serve(f"vLLM {vllm.__version__}", run, answers)


if __name__ == "__main__":
    main()
