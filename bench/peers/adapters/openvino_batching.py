"""OpenVINO GenAI's continuous batching, its loop in this process. The model is converted once and then kept."""

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import jobs


def converted(model: str, cache: str) -> Path:
    """Folder of the model in OpenVINO's form, in float32; the element type is chosen when it is loaded."""
    target = Path(cache) / f"openvino-{Path(model).name}"
    if target.is_dir():
        return target
    from optimum.exporters.openvino import main_export

    scratch = target.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    main_export(model, output=scratch, task="text-generation-with-past", convert_tokenizer=True)
    return scratch.rename(target)


def main() -> None:
    """Runs jobs."""
    answers = jobs.answers()
    model, dtype, threads, cache = jobs.arguments()
    folder = converted(model, cache)
    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
    }
    numbers = itertools.count()
    loaded: dict[bool, Any] = {}

    def pipeline(reuse: bool) -> Any:
        """The pipeline with or without reuse; both stay, as each compiles for the shapes that it meets."""
        if reuse not in loaded:
            config = genai.SchedulerConfig()
            config.max_num_batched_tokens = 256
            config.cache_size = 2
            config.enable_prefix_caching = reuse
            loaded[reuse] = genai.ContinuousBatchingPipeline(str(folder), config, "CPU", properties)
        return loaded[reuse]

    def generate(job: jobs.Job) -> jobs.Outcome:
        pipe = pipeline(job.reuse)
        config = genai.GenerationConfig(max_new_tokens=job.output_tokens, ignore_eos=True, do_sample=False)
        times: list[list[float]] = [[] for _ in job.prompts]
        tokens: list[list[int]] = [[] for _ in job.prompts]
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in job.prompts]
        handles: list[Any] = []
        begin = time.monotonic()
        while len(handles) < len(inputs) or pipe.has_non_finished_requests():
            # A prefix is found as soon as the request that computed it has its first token.
            waiting = job.ahead and not times[0]
            due = inputs[len(handles) : 1 if waiting else None]
            handles += [pipe.add_request(next(numbers), ids, config) for ids in due]
            pipe.step()
            now = time.monotonic() - begin
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[index] += output.generated_ids
                        times[index] += [now] * len(output.generated_ids)
        return times, tokens

    pipeline(True)
    jobs.serve(f"OpenVINO GenAI {genai.__version__}", generate, answers)


if __name__ == "__main__":
    main()
