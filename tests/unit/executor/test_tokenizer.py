"""A damaged tokenizer is refused in a sentence when the model is loaded; a model without one is served by token ids."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from executor.errors import ModelError
from executor.models.files import ModelFiles
from executor.models.tokenizer import TokenizerFiles, load_tokenizer
from scheduler.frontend.chat_template import ChatTemplate, Rendering
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, byte_level_tokenizer


def model(folder: Path) -> ModelFiles:
    """The files of a folder that the tokenizer needs."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), chat_template=CHAT_TEMPLATE).save_pretrained(
        folder
    )
    return ModelFiles("m", str(folder))


def test_a_whole_tokenizer_is_handed_on(tmp_path: Path) -> None:
    files = load_tokenizer(model(tmp_path))
    assert json.loads(files.json)["model"]["type"] == "BPE"
    assert files.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_of_several_templates_the_one_for_tools_is_used_with_tools(tools: list[Any] | None, tmp_path: Path) -> None:
    with_tools = "\n{{ tools | tojson }}\n{% for one in messages %}{{ one.role }}: {{ one.content }}{% endfor %}\n"
    templates = {"default": CHAT_TEMPLATE + "\n", "tool_use": with_tools}
    files = model(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), chat_template=templates)
    tokenizer.save_pretrained(tmp_path)
    found = load_tokenizer(files)
    messages = [{"role": "user", "content": "cat"}]
    rendered = ChatTemplate(found.chat_template, found.special_tokens, drops_reasoning=False)
    assert rendered.reads_tools
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered.render(messages, Rendering(tools=tools or [])) == expected


def test_a_template_that_is_given_takes_the_place_of_the_one_of_the_model(tmp_path: Path) -> None:
    given = tmp_path / "chat.jinja"
    given.write_text("{{ messages }}ü")
    files = model(tmp_path)
    assert load_tokenizer(files, given) == replace(load_tokenizer(files), chat_template="{{ messages }}ü")


DAMAGED: dict[str, tuple[str, Callable[[str], str]]] = {
    "cut": ("tokenizer.json", lambda text: text[: len(text) // 2]),
    "empty": ("tokenizer.json", lambda _: ""),
    "no JSON": ("tokenizer.json", lambda _: "version https://git-lfs.github.com/spec/v1"),
    "another object": ("tokenizer.json", lambda _: "[]"),
    "of no kind": ("tokenizer.json", lambda text: text.replace('"BPE"', '"XYZ"')),
    "configuration cut": ("tokenizer_config.json", lambda text: text[: len(text) // 2]),
    "configuration of another kind": ("tokenizer_config.json", lambda _: "[]"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_one_is_refused_in_a_sentence(damage: str, tmp_path: Path) -> None:
    files = model(tmp_path)
    name, change = DAMAGED[damage]
    path = tmp_path / name
    path.write_text(change(path.read_text()))
    with pytest.raises(ModelError, match=f"tokenizer of .*{tmp_path.name}.*download them again") as refused:
        load_tokenizer(files)
    assert "\n" not in str(refused.value)


def test_a_model_without_one_is_served_by_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(ModelFiles("m", str(tmp_path))) == TokenizerFiles()
