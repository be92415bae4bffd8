"""Up to where a conversation is to stay cached: from positions in its text to ranges of its tokens."""

from google.protobuf.duration_pb2 import Duration

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.chat_template import ChatTemplate
from scheduler.frontend.validation import Breakpoint, _breakpoint_ranges
from tests.support.generation import generate
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import StackFactory
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, byte_level_tokenizer


def seconds(value: int) -> Duration:
    return Duration(seconds=value)


def test_a_range_before_several_breakpoints_gets_the_best_retention() -> None:
    places = [
        Breakpoint(0, 5, 40, seconds(10)),
        Breakpoint(0, 9, 80, seconds(300)),
        Breakpoint(1, 2, 20, seconds(60)),
        Breakpoint(1, 9, 20, None),
    ]
    ranges = _breakpoint_ranges(places[:3], [4, 9, 20])
    made = [(kept.start, kept.end, kept.retention_priority, kept.retention_duration.seconds) for kept in ranges]
    assert made == [(0, 4, 80, 300), (4, 9, 80, 300), (9, 20, 20, 60)]
    assert not any(kept.HasField("retention_duration") for kept in _breakpoint_ranges(places, [4, 9, 20, 30]))
    # Two positions within one token.
    assert [(kept.start, kept.end) for kept in _breakpoint_ranges(places[:3], [4, 4, 20])] == [(0, 4), (4, 20)]
    assert _breakpoint_ranges(places[:1], [0]) == []


def test_a_breakpoint_is_found_in_every_template() -> None:
    messages = [{"role": "system", "content": "the cat "}, {"role": "user", "content": "the dog"}]
    for template in (
        CHAT_TEMPLATE,
        "{% for m in messages %}[{{ m.role|upper }}]{{ m.content|trim }}[/]{% endfor %}",
        "{{ messages[0].content }}\n{{ messages[1].content }}{{ messages|length }}",
    ):
        chat = ChatTemplate(template, {"eos_token": "<eos>"})
        prompt = chat.render(messages)
        for index, characters, before in ((0, 0, ""), (0, 3, "the"), (0, 7, "the cat"), (1, 0, ""), (1, 7, "the dog")):
            position = chat.position(prompt, messages, index, characters)
            assert prompt[:position].endswith(before), (template, index, characters)
            assert prompt[position:].startswith(messages[index]["content"][characters:].rstrip()[:1])


async def test_breakpoints_become_retention_ranges(run_stack: StackFactory) -> None:
    request = pb.StreamGenerateRequest(max_tokens=2, ignore_eos=True)
    first = request.chat.messages.add(role="system", content="the cat sat on the mat")
    first.cache_breakpoints.add(content_end=22, retention_priority=80, retention_duration=seconds(300))
    request.chat.messages.add(role="user", content="日本語 the").cache_breakpoints.add(
        content_end=3, retention_priority=50
    )
    executor = FakeExecutor()
    async with run_stack(executor=executor, manager=RealManager(executor)) as stack:
        await generate(stack.stub, request, patience(30))
        [admission] = stack.manager.admissions
    tokens = byte_level_tokenizer()
    known = [tokens.decode(list(admission.token_ids[: kept.end]), skip_special_tokens=False)
             for kept in admission.retention.ranges]  # fmt: skip
    assert known == ["<system>the cat sat on the mat", "<system>the cat sat on the mat<eos>\n<user>日本語"]
    assert [kept.start for kept in admission.retention.ranges] == [0, admission.retention.ranges[0].end]
    assert [kept.retention_priority for kept in admission.retention.ranges] == [80, 50]
