"""Tests that `make test` leaves out in addition to tests with the model: `make test-all` and CI run every test."""

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
    "tests/unit/executor/test_models.py::test_a_(wrong_model|tier_without_space|draft_model_with.*)_ends_the_process",
    # The CPU decoder with bfloat16, other counts of threads and fused layers.
    # Token eviction on any decoder but the default decoder.
    r"tests/kernels/test_decoder(_caches)?\.py.*(bfloat16|one thread|more threads than cores)",
    r"tests/kernels/test_decoder_caches\.py::test_attention_is_counted",
    "tests/unit/executor/test_exactness.*fused_layers",
    r"tests/unit/executor/test_token_eviction.*\[(torch|fused)-",
    # Whole schedulers with front ends in separate processes, beyond their answers.
    r"tests/unit/scheduler/test_frontends\.py::test_(?!the_number|a_control|another|front_ends_answer)",
    "tests/unit/scheduler/test_cors.py::test_a_browser",
    # Waiting for several seconds.
    r"tests/unit/cachemgr_service/test_restart.*(slow_redis|\[hung\]|is_late)",
    "tests/unit/cachemgr_service/test_operators_restored.py::test_(redis_away_at_the_start|a_late_share)",
    "tests/unit/scheduler/test_process.py::test_health_says_when_the_cache_manager",
    "tests/unit/router/test_fleet.py::test_(an_engine_that_no_router_can_read|a_pause|requests_of_a_lost|an_engine_whose)",
    "tests/unit/ops/test_layout.py::test_no_two_processes",
    "tests/unit/ops/test_redis_server.py::test_data_outlives_a_stop",
    "tests/unit/rpc/test_channel.py::test_a_(server_that_starts_again|stream_to_a_process)",
    "tests/unit/rpc/test_tracing.py::test_a_receiver_that_is_not_there",
    "tests/unit/kvctl/test_shards.py::test_(what_one_shard|events_of_both|checks_states)",
    # Every kind of Redis but a single server.
    r"tests/unit/cachemgr_service/.*(redis7|cluster)",
    "tests/unit/cachemgr_service/test_killed_at_any_moment",
    r"tests/unit/cachemgr_service/test_redis_agrees.*slow_redis",
    # Three of four random lives, and ghost caches of many shapes.
    "tests/unit/cachemgr/test_ghost_cache.py::test_ghost(s_are_within|_caches_predict_the_hits_of_short_prompts)",
    r"tests/unit/cachemgr_service/test_key_index.py::test_(blocks_that_stay|whatever_happens.*\[[4-9])",
    r"tests/unit/cachemgr/test_random_operations.*\[(2[5-9]|[3-9]\d)\]",
    r"tests/unit/cachemgr/test_random_operations.*two_engines.*\[([5-9]|1\d)\]",
    # Tests of the measuring programs.
    "tests/unit/(bench|chaos)/",
)
_PATTERN = re.compile("|".join(SLOW))


def is_slow(node_id: str) -> bool:
    """Whether `make test` leaves this test out."""
    return _PATTERN.match(node_id) is not None
