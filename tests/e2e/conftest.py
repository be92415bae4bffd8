"""A stack as users meet it, for the tests of its interfaces."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from executor.models.files import find
from tests.stack import Stack, model_cache
from tests.support.pages import elsewhere
from tests.support.ports import free_address

SMALL = {
    "executor_max_tokens": 4096,
    "executor_host_cache_size": "16MiB",
    "scheduler_max_running": 4,
    "scheduler_max_waiting": 8,
}


# As Hermes and Qwen write it.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nReturn a call within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="session")
def addresses() -> dict[str, str]:
    """The addresses at which `served` listens, by setting."""
    return elsewhere()


@pytest.fixture(scope="session")
def served(addresses: dict[str, str]) -> Iterator[Stack]:
    """With HTTP, metrics and a host tier, and so small a queue that a test fills it."""
    stack = Stack(**addresses, **SMALL)
    stack.own["cachemgr"] = {"cachemgr_operation_log": stack.folder / "operations.log"}
    with stack:
        yield stack


@pytest.fixture(scope="session")
def served_apart() -> Iterator[Stack]:
    """The same stack with two front ends in separate processes."""
    with Stack(**elsewhere(), **SMALL, scheduler_frontends=2) as stack:
        yield stack


@pytest.fixture(scope="module", params=["served", "served_apart"])
def api(request: pytest.FixtureRequest) -> Stack:
    """A stack whose scheduler serves HTTP itself, and one with front ends."""
    stack: Stack = request.getfixturevalue(request.param)
    return stack


@pytest_asyncio.fixture
async def client(api: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of that stack, which tries nothing again."""
    async with openai.AsyncOpenAI(base_url=f"http://{api.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tooled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with a chat template that reads tools."""
    folder = tmp_path_factory.mktemp("model") / "tooled"
    folder.mkdir()
    for path in Path(find("", model_cache()).source).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tooled(tooled_model: Path) -> Iterator[Stack]:
    """The default model with that template from a setting, and HTTP."""
    template = tooled_model / "chat_template.jinja"
    with Stack(
        executor_chat_template=template, executor_max_tokens=4096, scheduler_http_address=free_address()
    ) as stack:
        yield stack
