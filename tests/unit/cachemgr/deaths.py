"""Processes that die at random in a simulated world, with copies in every state, and come back."""

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cachemgr.blocks.block_record import BlockRecord
from tests.unit.cachemgr.operators import small_steps
from tests.unit.cachemgr.world import World

# Hypothesis draws all rules equally often.
CHANCE = st.integers(0, 9)
FINISHED = st.integers(0, 6)


class Deaths(RuleBasedStateMachine):
    """Deaths; the machine that inherits them makes the world. `finished` copies have run when it comes to one."""

    world: World

    @rule(chance=CHANCE)
    def scheduler_starts_again(self, chance):
        if chance == 7:
            with small_steps():
                self.world.start_scheduler()

    @rule(chance=CHANCE, finished=FINISHED, lost=st.integers(0, 9))
    def executor_starts_again(self, chance, finished, lost):
        if chance == 7:
            self.break_off(finished)
            self.lose_slots(lost)
            self.world.start_executor()

    @rule()
    def store_is_written(self):
        if self.world.unread is None:
            self.world.journal.flush()

    @rule(chance=CHANCE, finished=FINISHED, behind=st.booleans())
    def manager_starts_again(self, chance, finished, behind):
        if chance == 7:
            self.break_off(finished)
            self.fall_back(behind)
            self.world.restart_manager()

    @rule(chance=CHANCE, finished=FINISHED, behind=st.booleans())
    def manager_starts_before_the_store(self, chance, finished, behind):
        if chance == 7:
            self.break_off(finished)
            self.fall_back(behind)
            self.world.begin_recovery()

    @rule(count=st.integers(0, 6))
    def store_is_read(self, count):
        if self.world.unread:
            self.world.read_store(count)
        else:
            self.world.end_recovery()

    @rule(chance=CHANCE)
    def manager_starts_again_at_rest(self, chance):
        if chance == 7:
            self.rest()
            before = {block.place: block for block in self.world.manager.queries.records("e")}
            self.world.restart_manager()
            after = {block.place: block for block in self.world.manager.queries.records("e")}
            lost = {(block.group, block.key): block for place, block in before.items() if place not in after}
            for block in lost.values():
                if (block.group, block.parent_key) not in lost:
                    is_covered = any(_covers(other, block) for other in after.values())
                    assert is_covered or self.world.has_untold(block), f"{block} does not come back"

    def rest(self):
        """Everybody leaves, all copies run, and the store has everything."""
        world = self.world
        world.end_recovery()
        for live in list(world.live.values()):
            world.leave(live)
        world.carry_out()
        world.sync()
        world.back_up()
        world.confirm()
        world.journal.flush()

    @rule(chance=CHANCE, finished=FINISHED, lost=st.integers(0, 9), behind=st.booleans())
    def manager_and_executor_start_again(self, chance, finished, lost, behind):
        if chance == 7:
            self.break_off(finished)
            self.lose_slots(lost)
            self.fall_back(behind)
            self.world.lose_manager()
            self.world.come_back()

    @rule(chance=CHANCE)
    def executor_is_silent(self, chance):
        if chance == 7:
            self.world.silence_executor()

    @rule(chance=CHANCE, finished=FINISHED)
    def executor_is_away(self, chance, finished):
        if chance == 7:
            self.break_off(finished)
            self.world.expire_executor()
            self.world.come_back()

    def break_off(self, finished):
        """Of the copies that somebody was told of the first ones have run, and the next is broken off."""
        world = self.world
        told = [copy for live in world.live.values() if not live.started for copy in live.copies]
        told += [copy for copy in world.manager.queries.executor_transfers("e") if copy.ticket not in world.done]
        world.step_number += 1
        for number, copy in enumerate(sorted(told, key=lambda copy: copy.ticket)[: finished + 1]):
            world.copy(copy, number == finished)

    def fall_back(self, behind):
        """The store may have been behind the manager when that died."""
        if behind and self.world.unread is None:
            self.world.journal.fall_back()

    def lose_slots(self, lost):
        """What lies in a lower slot may be lost, too."""
        for place in list(self.world.generations)[lost::5] if lost < 5 else ():
            self.world.generations[place] = 0


DEATHS = {
    "store_is_written": 6,
    "scheduler_starts_again": 1,
    "executor_starts_again": 2,
    "manager_starts_again": 2,
    "manager_starts_before_the_store": 3,
    "store_is_read": 5,
    "manager_starts_again_at_rest": 1,
    "manager_and_executor_start_again": 1,
    "executor_is_silent": 1,
    "executor_is_away": 1,
}


def death_arguments(name: str, random: Random) -> dict[str, object]:
    """What one of them is called with."""
    if name == "store_is_written":
        return {}
    if name == "store_is_read":
        return {"count": random.randrange(7)}
    found: dict[str, object] = {"chance": random.choice([0, 0, 0, 7])}
    if name not in ("scheduler_starts_again", "executor_is_silent", "manager_starts_again_at_rest"):
        found["finished"] = random.randrange(8)
    if name in ("executor_starts_again", "manager_and_executor_start_again"):
        found["lost"] = random.randrange(10)
    if name in ("manager_starts_again", "manager_starts_before_the_store", "manager_and_executor_start_again"):
        found["behind"] = random.random() < 0.5
    return found


def _covers(longer: BlockRecord, block: BlockRecord) -> bool:
    """Whether a longer sibling holds the tokens of a partly filled block, which then is of no use beside it."""
    siblings = (longer.group, longer.parent_key, longer.salt) == (block.group, block.parent_key, block.salt)
    return siblings and len(longer.tokens) > len(block.tokens) and longer.tokens.startswith(block.tokens)
