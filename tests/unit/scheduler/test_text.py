"""From tokens to text: whole characters, stop strings, templates."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.frontend.chat_template import ChatTemplate, ChatTemplateError, Rendering, UnreadFieldError
from scheduler.frontend.detokenizer import Detokenizer
from scheduler.frontend.stop_strings import StopStrings
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer, space_prefix_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=40)


def byte_tokens(text: str) -> list[int]:
    """One token per byte."""
    tokenizer = byte_level_tokenizer()
    alphabet = _byte_alphabet()
    return [tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]


def _byte_alphabet() -> dict[int, str]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=6), TEXT, st.integers(1, 20))
def test_the_pieces_are_the_whole_text_however_it_is_split(
    parts: list[tuple[str, bool]], prompt: str, at_once: int
) -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = [
        token for text, merged in parts for token in (tokenizer.encode(text).ids if merged else byte_tokens(text))
    ]
    detokenizer = Detokenizer(tokenizer, byte_tokens(prompt))
    pieces = [detokenizer.push(token_ids[at : at + at_once]) for at in range(0, len(token_ids), at_once)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == "".join(text for text, _ in parts)


@given(TEXT, st.integers(0, 200))
def test_a_character_split_between_prompt_and_output_is_completed(text: str, at: int) -> None:
    token_ids = byte_tokens(text)
    at = min(at, len(token_ids))
    detokenizer = Detokenizer(byte_level_tokenizer(), token_ids[:at])
    out = "".join([detokenizer.push([token]) for token in token_ids[at:]]) + detokenizer.flush()
    assert text.endswith(out)
    assert len(out) >= len(text.encode()[at:].decode(errors="ignore"))


@given(st.lists(st.integers(1, 319), max_size=16), st.integers(1, 16))
def test_no_piece_ends_within_a_character_unless_it_never_ends(token_ids: list[int], at_once: int) -> None:
    detokenizer = Detokenizer(byte_level_tokenizer(), [])
    pieces = [detokenizer.push(token_ids[at : at + at_once]) for at in range(0, len(token_ids), at_once)]
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces)


def test_output_that_never_becomes_a_character_is_sent_in_the_end() -> None:
    broken = byte_tokens("é")[0]
    detokenizer = Detokenizer(byte_level_tokenizer(), [])
    pieces = [detokenizer.push([broken]) for _ in range(100)]
    assert "".join(pieces) + detokenizer.flush() == "\N{REPLACEMENT CHARACTER}" * 100
    assert len("".join(pieces)) > 80


def test_a_character_that_is_open_holds_back_nothing_before_it() -> None:
    detokenizer = Detokenizer(byte_level_tokenizer(), [])
    whole = byte_tokens("many words é")
    assert detokenizer.push(whole[:-1]) == "many words "
    assert detokenizer.push(whole[-1:]) == "é"


def test_the_space_in_front_of_a_words_first_token_is_kept() -> None:
    tokenizer = space_prefix_tokenizer()
    the, cat, sat = (tokenizer.token_to_id(word) for word in ("▁the", "▁cat", "▁sat"))
    detokenizer = Detokenizer(tokenizer, [the])
    assert [detokenizer.push([cat]), detokenizer.push([sat])] == [" cat", " sat"]
    first = Detokenizer(tokenizer, [])
    assert [first.push([the]), first.push([cat])] == ["the", " cat"]
    together = Detokenizer(tokenizer, [])
    assert [together.push([the, cat]), together.push([sat])] == ["the cat", " sat"]


def test_special_tokens_are_text_only_where_they_are_kept() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer.encode("the cat").ids, EOS, *byte_tokens("é"), EOS]
    for keep, text in ((False, "the caté"), (True, "the cat<eos>é<eos>")):
        for at_once in (1, 3, len(ids)):
            detokenizer = Detokenizer(tokenizer, [EOS], keep_special=keep)
            pieces = [detokenizer.push(ids[at : at + at_once]) for at in range(0, len(ids), at_once)]
            assert "".join([*pieces, detokenizer.flush()]) == text


def test_byte_fallback_tokens_become_a_character() -> None:
    tokenizer = space_prefix_tokenizer()
    detokenizer = Detokenizer(tokenizer, [tokenizer.token_to_id("▁the")])
    pieces = [detokenizer.push([tokenizer.token_to_id(f"<0x{byte:02X}>")]) for byte in "日".encode()]
    assert pieces == ["", "", "日"]


def test_byte_fallback_tokens_that_come_together_become_whole_characters() -> None:
    tokenizer = space_prefix_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    token_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "ሰላምልጅ".encode()]
    pieces = [detokenizer.push(token_ids[at : at + 6]) for at in range(0, len(token_ids), 6)]
    assert pieces == ["ሰላ", "ምል", "ጅ"]


SMALL = st.text("ab.", min_size=1, max_size=4)


@given(st.lists(SMALL, max_size=3), st.lists(st.text("ab.", max_size=5), max_size=8))
def test_stop_strings_are_found_across_pieces_and_never_sent(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    sent, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent += text
        if stopped:
            break
    else:
        sent += matcher.flush()
    whole = "".join(pieces)
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert stopped == bool(ends)
    if not ends:
        assert sent == whole
    else:
        assert whole.startswith(sent)
        assert not any(stop in sent for stop in stops)


@given(st.lists(SMALL, min_size=1, max_size=3), st.lists(st.text("ab.", max_size=5), max_size=8))
def test_an_included_stop_string_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    texts, ends = [], []
    for included in (False, True):
        matcher = StopStrings(stops, included=included)
        sent, stopped = "", False
        for piece in pieces:
            text, stopped = matcher.push(piece)
            sent += text
            if stopped:
                break
        texts.append(sent if stopped else sent + matcher.flush())
        ends.append(stopped)
    assert ends[0] == ends[1]
    assert texts[1].removeprefix(texts[0]) in (stops if ends[0] else [""])
    assert "".join(pieces).startswith(texts[1])


@given(
    st.lists(SMALL, min_size=1, max_size=3),
    st.lists(st.text("ab.", max_size=5), max_size=4),
    st.lists(st.text("ab.", max_size=5), max_size=8),
)
def test_a_stop_string_of_the_least_tokens_is_text_and_may_begin_one_that_ends_behind_them(
    stops: list[str], least: list[str], pieces: list[str]
) -> None:
    matcher = StopStrings(stops)
    sent, stopped = "", False
    for index, piece in enumerate(least + pieces):
        text, stopped = matcher.push(piece, may_end=index >= len(least))
        sent += text
        if stopped:
            break
    else:
        sent += matcher.flush()
    whole, bound = "".join(least + pieces), len("".join(least))
    ends = [at for stop in stops if (at := whole.find(stop, max(0, bound - len(stop) + 1))) >= 0]
    assert stopped == bool(ends)
    assert whole.startswith(sent) if ends else sent == whole


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.push("a <") == ("a ", False)
    assert matcher.push("/e") == ("", False)
    assert matcher.push("x") == ("</ex", False)
    assert matcher.push("</end>b") == ("", True)


def test_a_template_renders_as_transformers_does() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<eos>"})
    messages = [{"role": "user", "content": "<b>"}]
    assert template.render(messages) == "<user><b><eos>\n<assistant>"
    assert ChatTemplate("{{ messages | tojson }}", {}).render(messages) == '[{"role": "user", "content": "<b>"}]'
    assert ChatTemplate("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('x') }}", {}).render([]) == "x"


def test_tools_and_their_calls_are_rendered_as_transformers_does() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"},
    ]
    template = ChatTemplate("{{ tools | tojson }}{{ messages | tojson }}", {})
    assert json.loads(f"[{template.render(messages, Rendering(tools=[tool])).replace('][', '],[')}]") == [
        [tool],
        messages,
    ]
    assert template.render([]) == "null[]"
    # An answer follows its call, which tells templates the rest.
    assert ChatTemplate("{{ messages[1].content }}{{ messages[0].tool_calls }}", {}).render(messages).startswith("4")
    with pytest.raises(UnreadFieldError, match="tool_calls of message 0"):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(messages)


@pytest.mark.parametrize(
    "source",
    ["{% if tools is defined %}{% endif %}", "{% set tools = custom if custom is defined else tools %}",
     "{% if custom %}{% set tools = custom %}{% endif %}{% if not tools is defined %}{% set tools = none %}{% endif %}",
     "{% macro f() %}{% for t in tools %}{{ t }}{% endfor %}{% endmacro %}"],
)  # fmt: skip
def test_a_template_reads_tools_in_any_way(source: str) -> None:
    assert ChatTemplate(source, {}).reads_tools


@pytest.mark.parametrize("source", ["", "{{ messages }}", "tools", "{% set tools = 1 %}", "{{ builtin.tools }}"])
def test_a_template_may_not_read_tools(source: str) -> None:
    assert not ChatTemplate(source, {}).reads_tools


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ x.y.z }}", "{{ 1 + 'x' }}", "{{ 1 / 0 }}"]
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([])


NAMED = {"role": "user", "content": "hello", "name": "al"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning": "2+2"}


@pytest.mark.parametrize(
    ("source", "message", "field"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", NAMED, "name"),
        ("{% for m in messages %}{{ m.content }}{{ (m.tool or {}).name }}{% endfor %}", NAMED, "name"),
        ("{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}", THOUGHT, "reasoning"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}", NAMED, "content"),
        ("{{ messages[0].content }}{{ messages[1].name }}", NAMED, "content"),
    ],
)
def test_a_field_that_the_template_does_not_read_is_an_error(source: str, message: dict[str, str], field: str) -> None:
    with pytest.raises(UnreadFieldError) as caught:
        ChatTemplate(source, {}).render([{"role": "system", "content": "x"}, message])
    assert (caught.value.message, caught.value.field) == (1, field)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m['name'] }}:{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m.get('name') }}:{{ m.get('content') }}{% endfor %}",
        "{{ messages | map(attribute='name') | join }}:{{ messages | map(attribute='content') | join }}",
        "{% for m in messages %}{% for k, v in m.items() %}{{ (v ~ ':') if k == 'name' }}{% endfor %}hello{% endfor %}",
        "{% for k in messages[0] %}{{ 'al:hello' if k == 'name' }}{% endfor %}",
        "{{ messages[0] | dictsort | length and 'al:hello' }}",
        "{{ 'al:hello' if messages | tojson(indent=1) }}",
        "{{ 'al:hello' if 'name' in messages[0] and messages[0].values() | list }}",
    ],
)
def test_a_template_reads_a_message_in_any_way(source: str) -> None:
    assert ChatTemplate(source, {}).render([NAMED]) == "al:hello"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_either_name_and_may_be_left_out_by_the_template_itself(field: str) -> None:
    source = (
        "{% for m in messages %}{% set thought = m." + field + " if m." + field + " is string else '' %}"
        "{% if loop.last and thought %}<think>{{ thought }}</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.render([THOUGHT, THOUGHT]) == "4<think>2+2</think>4"
    assert template.position("4<think>2+2</think>4", [THOUGHT, THOUGHT], 1, 0) == 19
    assert template.render([{"role": "user", "content": "4"}]) == "4"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, CHATML, TRIMMING])
@pytest.mark.parametrize("content", ["The capital", "a", " The  capital ", "a<|im_end|>\na", "é\n"])
def test_a_final_message_is_continued_as_transformers_does(source: str, content: str) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    [[expected], _] = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, eos_token="/"
    )
    continued = Rendering(add_generation_prompt=False, continue_final_message=True)
    template = ChatTemplate(source, {"eos_token": "/"})
    prompt = template.render(messages, continued)
    # transformers trims what stands behind a content that is trimmed in front, even where the template keeps it.
    assert prompt.rstrip() == expected.rstrip()
    assert prompt.endswith(content if source != TRIMMING else content.strip())
    assert template.position(prompt, messages, 1, len(content), continued) == len(prompt)
    assert 0 < template.position(prompt, messages, 0, len(content), continued) < len(prompt)


def test_a_final_message_that_the_template_leaves_out_is_not_continued() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[0] if loop.last else m.content }}{% endfor %}"
    continued = Rendering(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="leaves out the final message"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": "a</think>b"}], continued)


@pytest.mark.parametrize(
    ("arguments", "end"),
    [({}, "<|im_start|>assistant\n"), ({"enable_thinking": False, "unread": [1]}, "assistant\n<think></think>"),
     ({"enable_thinking": True}, "assistant\n"), ({"messages": [], "eos_token": "x"}, "assistant\n")],
)  # fmt: skip
def test_a_template_reads_its_arguments_and_none_in_place_of_its_own_variables(
    arguments: dict[str, Any], end: str
) -> None:
    template = ChatTemplate(CHATML, {"eos_token": "<eos>"})
    said = [{"role": "user", "content": "hello"}]
    assert template.render(said, Rendering(arguments=arguments)).endswith(end)
    assert template.render(said, Rendering(False, arguments=arguments)).endswith("hello<|im_end|>\n")
    for name in ("messages", "tools", "documents", "add_generation_prompt", "eos_token"):
        assert template.reserves(name)
    assert not template.reserves("enable_thinking")


@pytest.mark.parametrize("effort", ["x", [], {}, None, -1])
def test_an_argument_of_another_type_than_the_template_expects_is_an_error(effort: Any) -> None:
    template = ChatTemplate("{{ 1.5 / (effort + 1) }}", {})
    with pytest.raises(ChatTemplateError):
        template.render([], Rendering(arguments={"effort": effort}))
