from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from agent.llm.mock_script import parse_script
from agent.llm.mock_server import MockServer
from agent.llm.model import Message, Request, ToolSpec
from agent.llm.openai_model import OpenAIModel
from agent.llm.retry_policy import RetryPolicy
from agent.settings import LLMSettings

KEY = "sk-test-0123456789abcdef"
TOOL = ToolSpec(
    "python_execute",
    "Run Python.",
    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"], "additionalProperties": False},
)
ASK = Request("actor", (Message("system", "You act."), Message("user", "Goal: add up")), (TOOL,))
CALLING = {"text": "I run it.", "call": [{"name": "python_execute", "arguments": {"code": "print(1)"}}]}

Serve = Callable[..., MockServer]
MakeModel = Callable[..., OpenAIModel]


async def no_sleep(_seconds: float) -> None:
    """Waits are judged by unit tests and by llmock; here they only cost time."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a scripted model: quirks, and the replies of its one rule."""
    with ExitStack() as stack:

        def start(*quirks: Any, replies: Any = None, api_key: str | None = None) -> MockServer:
            rule = {"name": "any", "quirks": list(quirks), "reply": replies or [CALLING], "on_exhausted": "repeat"}
            server = MockServer(parse_script({"rule": [rule]}), api_key=api_key)
            return stack.enter_context(server)

        yield start


@pytest.fixture
async def model() -> AsyncIterator[MakeModel]:
    """Make a model of a server; short times, waits of no time unless a policy is given."""
    made: list[OpenAIModel] = []

    def make(base_url: str | MockServer, policy: RetryPolicy | None = None, **settings: Any) -> OpenAIModel:
        times = {"connect_s": 2, "first_token_s": 5, "between_chunks_s": 5, "total_s": 30, **settings}
        url = base_url if isinstance(base_url, str) else base_url.base_url
        policy = policy or RetryPolicy(sleep=no_sleep)
        made.append(OpenAIModel("scripted", LLMSettings(**times), base_url=url, api_key=KEY, policy=policy))
        return made[-1]

    yield make
    for each in made:
        await each.close()
