"""Two schedulers and one executor: it belongs to the first scheduler until this scheduler's lease has ended."""

import time

import grpc
import pytest
from supervisor import is_serving

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import MODULES, Stack
from tests.support.generation import greedy_request
from tests.support.patience import patience

pytestmark = pytest.mark.model


def generated(address: str) -> int:
    """Tokens of an answer."""
    with grpc.insecure_channel(address) as channel:
        request = greedy_request(list(range(100, 120)), 4)
        messages = list(rpc.GenerationServiceStub(channel).StreamGenerate(request, timeout=patience(60)))
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
        return messages[-1].usage.output_tokens


def test_a_second_scheduler_takes_over_once_the_lease_of_the_first_ends() -> None:
    with Stack(cachemgr_lease_seconds=3) as stack:
        second = f"unix:{stack.folder}/second.sock"
        stack.modules = MODULES | {"second": "scheduler"}
        stack.own["second"] = {"scheduler_scheduler_id": "second", "scheduler_address": second}
        stack.start("second")
        end = time.monotonic() + patience(60)
        while "EXECUTOR_IN_USE" not in stack.log_path("second").read_text():
            assert time.monotonic() < end, stack.logs()
            time.sleep(0.1)
        assert generated(stack.scheduler) == 4
        stack.kill("scheduler")
        end = time.monotonic() + patience(60)
        while not is_serving(second):
            assert time.monotonic() < end, stack.logs()
            time.sleep(0.1)
        assert generated(second) == 4
