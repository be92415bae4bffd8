"""transformers' continuous batching, whose loop runs in a thread of this process and notes when each token comes."""

import os
import time
from typing import Any

import jobs

PAGE_TOKENS, PAGES, STEP_TOKENS = 256, 256, 512


def main() -> None:
    """Runs jobs."""
    answers = jobs.answers()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    model_folder, dtype, threads, _ = jobs.arguments()
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    running: dict[bool, Any] = {}

    def manager(reuse: bool) -> Any:
        """The loop with or without reuse; only one loop exists at a time."""
        if reuse not in running:
            while running:
                running.popitem()[1].stop(block=True)
            config = transformers.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS, num_blocks=PAGES, max_batch_tokens=STEP_TOKENS, allow_block_sharing=reuse
            )
            running[reuse] = model.init_continuous_batching(generation, config)
            running[reuse].start()
        return running[reuse]

    @torch.inference_mode()
    def run(job: jobs.Job) -> jobs.Outcome:
        loop = manager(job.reuse)
        begin = time.perf_counter()
        prompts = [list(prompt) for prompt in job.prompts]
        names = loop.add_requests(prompts, max_new_tokens=job.output_tokens, record_timestamps=True)
        done: dict[str, Any] = {}
        while len(done) < len(names):
            result = loop.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not loop.is_running():
                raise RuntimeError("the loop ended by itself")
        if failed := [result.error for result in done.values() if result.error]:
            raise RuntimeError(failed[0])
        times = [[stamp - begin for stamp in done[name].timestamps] for name in names]
        return times, [list(done[name].generated_tokens) for name in names]

    jobs.serve(f"transformers {transformers.__version__} continuous batching", run, answers)
    while running:
        running.popitem()[1].stop(block=True)


if __name__ == "__main__":
    main()
