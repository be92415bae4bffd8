"""The device never waits for work that the device's thread could already have launched."""

from tests.support.simulated_device import outputs_of


def test_a_step_that_arrives_while_another_computes_is_launched_at_once() -> None:
    # The device ends no step before the next one is launched: a worker that waited for it first would hang.
    assert [output.number for output in outputs_of(12)] == list(range(1, 13))
