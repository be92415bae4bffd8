"""Copy tickets: reserved until they end, believed when they are confirmed."""

from tests.support.in_process_manager import World


def copying(num_blocks=8):
    """A sequence "b" with an open copy of two tokens."""
    world = World(num_blocks)
    world.cache([*range(4), 10, 11, 12])
    admission = world.admit([*range(4), 10, 11, 20, 21, 22], "b")
    (copy,) = admission.transfers
    assert (admission.cached_tokens, copy.num_tokens) == (6, 2)
    return world, copy


def test_a_source_cannot_be_taken_while_its_copy_is_open():
    world, _ = copying(num_blocks=4)
    # One cached block is the source; two are used; one is the target.
    assert world.free == 0
    assert not world.admit([50]).admitted
    world.step()
    world.confirm()
    assert world.free == 1
    world.check()


def test_a_confirmation_is_counted_once():
    world, copy = copying()
    world.step()
    confirm = world.manager.confirm_transfers
    assert confirm("e", 1, [copy.ticket], []) == 0
    assert confirm("e", 1, [copy.ticket], []) == 1
    assert confirm("e", 1, [copy.ticket + 1], [copy.ticket + 2]) == 2
    world.check()


def test_a_failed_copy_voids_its_sequence_and_nothing_of_it_is_found():
    world, _ = copying()
    world.step(most=20, fail_copies=True)
    world.confirm()
    handle = world.live["b"].handle
    assert world.sync().void_handles == [handle]
    world.sync()
    world.check()
    assert world.admit([*range(4), 10, 11, 20, 21, 22], "c").cached_tokens == 6


def test_cancelling_the_ticket_of_a_live_sequence_voids_it():
    world, copy = copying()
    world.cancelled.append(copy.ticket)
    handle = world.live["b"].handle
    assert world.sync().void_handles == [handle]
    world.check()


def test_what_a_released_copys_source_stands_on_is_not_evicted():
    world, _ = copying(num_blocks=4)
    world.step()
    world.forget(world.live["b"])
    world.manager.release(world.caller, "b")
    assert world.free == 1
    assert not world.admit([50, 51, 52, 53, 54]).admitted
    assert world.admit([50]).admitted
    world.check()
    world.confirm()
    world.check()
