"""Which tests `make test` leaves out, beside those that need the model: `make test-all` and CI run every test."""

import re

# Beginnings of node ids, as regular expressions.
SLOW = (
    # Whole stacks of processes, a browser, Helm, Docker and systemd.
    "tests/(e2e|security)/",
    "tests/console/test_page",
    "tests/integration/test_(deploy_.*|run_stack|grpcurl|broken_folders)",
    # Compilation for GPUs and with sanitizers; the kernels in Triton's interpreter.
    "tests/kernels/test_(ahead_of_time|sanitizers|package|decoder_counting|decoder_weights)",
    "tests/unit/executor/test_cuda_decoder",
    r"tests/(kernels|unit/executor)/.*\binterpreter\b",
    # Whole executor processes.
    "tests/unit/executor/test_models.py::test_a_(wrong_model|tier_without_space)_ends_the_process",
    # The CPU decoder with bfloat16, other counts of threads and fused layers.
    # Token eviction on any decoder but the default one.
    r"tests/kernels/test_decoder\.py.*(bfloat16|one thread|more threads than cores)",
    "tests/unit/executor/test_exactness.*fused_layers",
    r"tests/unit/executor/test_token_eviction.*\[(torch|fused)-",
    # Every kind of Redis but one single server.
    r"tests/unit/cachemgr_service/.*(redis7|cluster)",
    "tests/unit/cachemgr_service/test_killed_at_any_moment",
    r"tests/unit/cachemgr_service/test_redis_agrees.*slow_redis",
    # Three of four random lives, and ghost caches of many shapes.
    "tests/unit/cachemgr/test_ghost_cache.py::test_ghost_caches_predict_the_hits_of_short_prompts",
    r"tests/unit/cachemgr/test_random_operations.*\[(2[5-9]|[3-9]\d)\]",
    # Tests of the measuring programs.
    "tests/unit/(bench|chaos)/",
)
_PATTERN = re.compile("|".join(SLOW))


def is_slow(node_id: str) -> bool:
    """Whether `make test` leaves this test out."""
    return _PATTERN.match(node_id) is not None
