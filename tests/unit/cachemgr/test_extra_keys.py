"""Images in prompts: forks, truncations and prefix hits with extra keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.types import ExtraKey, MissReason, Prefix
from tests.support.in_process_manager import World

# Two blocks of text, then placeholders of an image, then text.
PROMPT = [1, 2, 3, 4, 5, 6, 9, 9, 9, 9, 7, 8, 1]
CAT, DOG = b"cat" * 8, b"dog" * 8


def image(digest: bytes = CAT, start: int = 6, length: int = 4) -> tuple[ExtraKey, ...]:
    return (ExtraKey(start, length, digest),)


def hits(world: World, tokens: list[int] = PROMPT, extra_keys: tuple[ExtraKey, ...] = ()) -> int:
    """What an admission finds, computed to the end to see that it is right."""
    admission = world.run(tokens, extra_keys=extra_keys)
    world.check()
    world.finish(f"q{world.names}")
    world.check()
    return admission.cached_tokens


@pytest.mark.parametrize("length", range(7, 12))
def test_a_fork_through_an_image_is_found_again(length):
    world = World(24)
    parent = world.request(PROMPT, "a", extra_keys=image())
    world.enter(parent, world.manager.admit(parent), PROMPT)
    for _ in range(6):
        world.step()
        world.sync()
    child = world.request(PROMPT[:length], "b", extra_keys=image(length=min(4, length - 6)))
    world.enter(child, world.manager.fork(world.caller, "a", "b", length), PROMPT[:length])
    world.finish("a")
    world.finish("b")
    world.check()
    assert hits(world, PROMPT[:length], image(length=min(4, length - 6))) == length - 1


def test_a_sequence_truncated_within_an_image_is_found_again():
    world = World(24)
    world.run(PROMPT, "a", extra_keys=image())
    live = world.live["a"]
    # The image reaches to the new end, which other tokens follow.
    world.truncate("a", 9)
    world.compute(live, 12)
    world.sync()
    tokens = list(live.tokens)
    world.finish("a")
    world.check()
    assert hits(world, [*tokens, 1], image(length=3)) == 12


@given(data=st.data())
def test_prefix_hits_have_the_same_images_at_the_same_positions(data):
    """Two prompts of few different tokens with images of random length: exactly the equal part is found."""
    prompts = []
    for _ in range(2):
        tokens = data.draw(st.lists(st.sampled_from([1, 9]), min_size=6, max_size=14))
        images, start = [], 0
        while start < len(tokens) and data.draw(st.booleans()):
            start += data.draw(st.integers(0, len(tokens) - start - 1))
            length = data.draw(st.integers(1, len(tokens) - start))
            images.append(ExtraKey(start, length, data.draw(st.sampled_from([CAT, DOG]))))
            start += length
        prompts.append((tokens, tuple(images)))
    (first, its), (second, others) = prompts
    world = World(16)
    world.cache(first, extra_keys=its)
    common = 0
    for one, other in zip(meaning(first, its), meaning(second, others), strict=False):
        if one != other:
            break
        common += 1
    found = hits(world, second, others)
    assert min(common, len(second) - 1) // 4 * 4 <= found <= common


def meaning(tokens, images):
    """Of each token: itself, and the image and the position in it that it stands for."""
    beside = {image.start + at: (image.digest, at) for image in images for at in range(image.length)}
    return [(token, beside.get(position)) for position, token in enumerate(tokens)]


def test_admissions_with_the_same_image_compute_it_once_and_others_do_not_wait():
    world = World(24)
    world.admit(PROMPT, "a", extra_keys=image())
    same = world.admit(PROMPT, "b", extra_keys=image())
    other = world.admit(PROMPT, "c", extra_keys=image(DOG))
    assert (same.cached_tokens, other.cached_tokens) == (12, 4)
    for _ in range(6):
        world.step()
        world.confirm()
        world.sync()
        world.check()


def test_a_prompt_with_an_image_is_explained():
    world = World(16)
    world.cache(PROMPT, extra_keys=image())
    (found,) = world.queries.explain(Prefix(tuple(PROMPT), extra_keys=image()), 0)
    assert (len(found.blocks), found.miss_reason) == (3, MissReason.NONE)
    (found,) = world.queries.explain(Prefix(tuple(PROMPT), extra_keys=image(DOG)), 0)
    assert (len(found.blocks), found.miss_reason) == (1, MissReason.NEVER_STORED)
