"""The rates of `kvctl top`: of one scheduler, and of a router's engines."""

from kvctl.measure.readings import Reading, rates
from kvctl.shards import Answers
from protos.generation.v1 import generation_pb2 as pb


def routed(at: float, **steps: int) -> Reading:
    """What a router lists, whose own count of steps is of something else. steps: of engines that answer."""
    engines = [pb.RoutedEngine(address=name, loads=pb.GetLoadsResponse(steps=count)) for name, count in steps.items()]
    listed = pb.ListEnginesResponse(engines=[*engines, pb.RoutedEngine(address="away")])
    metrics = {"kvkeep_router_prompt_tokens_total": 100 * at, "kvkeep_scheduler_prompt_tokens_total": 7 * at}
    loads = pb.GetLoadsResponse(steps=int(1000 * at))
    return Reading(at, Answers({}), routed=True, loads=loads, engines=listed, metrics=metrics)


def test_steps_of_a_router_are_those_of_its_engines() -> None:
    # Another engine came, one has begun to count anew.
    found = rates(routed(1.0, a=10, b=20, c=500), routed(3.0, a=30, b=60, c=4, d=9))
    assert found["steps_per_second"] == 30.0
    assert rates(routed(1.0, a=10), routed(3.0))["steps_per_second"] is None


def test_rates_are_those_of_the_process_that_callers_reach() -> None:
    assert rates(routed(1.0), routed(3.0))["prompt_tokens_per_second"] == 100.0
    alone = [Reading(reading.at, reading.shards, loads=reading.loads, metrics=reading.metrics)
             for reading in (routed(1.0), routed(3.0))]  # fmt: skip
    found = rates(*alone)
    assert (found["prompt_tokens_per_second"], found["steps_per_second"]) == (7.0, 1000.0)
