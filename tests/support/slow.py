"""Which tests `make test` leaves out, beside those that need the model: `make test-all` and CI run every test."""

import re

# Beginnings of node ids, as regular expressions.
SLOW = (
    # Whole stacks of processes, a browser, Helm, Docker and systemd.
    "tests/(e2e|security)/",
    "tests/console/test_page",
    "tests/integration/test_(deploy_.*|run_stack|grpcurl|broken_folders)",
    # Compilation for GPUs and with sanitizers; the kernels in Triton's interpreter.
    "tests/kernels/test_(ahead_of_time|sanitizers|package)",
    r"tests/kernels/.*\[interpreter",
    # Every kind of Redis but one single server.
    r"tests/unit/cachemgr_service/.*(redis7|cluster)",
    "tests/unit/cachemgr_service/test_killed_at_any_moment",
    # Tests of the measuring programs.
    "tests/unit/(bench|chaos)/",
)
_PATTERN = re.compile("|".join(SLOW))


def is_slow(node_id: str) -> bool:
    """Whether `make test` leaves this test out."""
    return _PATTERN.match(node_id) is not None
