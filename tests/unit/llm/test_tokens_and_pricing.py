from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.model import Message, Request, ToolCall, ToolSpec, Usage
from agent.llm.pricing import UNKNOWN, price_of, unpriced
from agent.llm.tokens import add_usage, estimate_request, estimate_text, read_usage
from agent.settings import LLMSettings


@pytest.mark.parametrize(
    ("text", "at_least"),
    [  # counts that byte-pair tokenizers of today come near
        ("The quick brown fox jumps over the lazy dog.", 10),
        ("import pandas as pd\ndf = pd.read_csv('x.csv')\nprint(df.describe())", 22),
        ("3.14159265,2.71828182,1.41421356", 15),
        ("数据分析的结果如下所示", 7),
        ("{}[]();:,.<>/\\|", 9),
        ("", 0),
    ],
)
def test_the_estimate_is_an_upper_one_but_no_wild_one(text: str, at_least: int) -> None:
    assert at_least <= estimate_text(text) <= 3 * at_least + 3


@given(st.text(max_size=200), st.text(max_size=200))
def test_more_text_is_never_estimated_as_fewer_tokens(first: str, second: str) -> None:
    assert estimate_text(first + second) >= estimate_text(first)


def test_tools_calls_and_provider_fields_count() -> None:
    bare = Request("actor", (Message("user", "go"),))
    tool = ToolSpec("f", "Reads a file.", {"type": "object"})
    said = Message("assistant", "", (ToolCall("c", "f", '{"path": "a"}'),), extra={"reasoning_content": "long thought"})
    assert estimate_request(Request("actor", bare.messages, (tool,))) > estimate_request(bare)
    assert estimate_request(Request("actor", (*bare.messages, said))) > estimate_request(bare) + 10


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4}, Usage(9, 4)),
        ({"prompt_tokens": 9.0, "completion_tokens": "4"}, Usage(9, 4)),
        (
            {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6},
             "completion_tokens_details": {"reasoning_tokens": 3}},
            Usage(9, 4, 6, 3),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_cache_hit_tokens": 5}, Usage(9, 4, 5)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 99}}, Usage(9, 4, 9)),
        (None, Usage(100, 50, estimated=True)),
        ("many", Usage(100, 50, estimated=True)),
        ({"prompt_tokens": "many", "completion_tokens": None, "prompt_tokens_details": 7}, Usage(100, 50, estimated=True)),
        ({"prompt_tokens": -1, "completion_tokens": True}, Usage(100, 50, estimated=True)),
        ({"prompt_tokens": float("nan"), "completion_tokens": float("inf")}, Usage(100, 50, estimated=True)),
        ({"prompt_tokens": 9}, Usage(9, 50, estimated=True)),
    ],
)  # fmt: skip
def test_usage_of_any_type(raw: Any, usage: Usage) -> None:
    assert read_usage(raw, prompt_estimate=100, completion_estimate=50) == usage


def test_usages_add_up() -> None:
    assert add_usage(None, None) is None
    assert add_usage(Usage(1, 2), None) == Usage(1, 2)
    assert add_usage(Usage(1, 2, 1, 1), Usage(3, 4, estimated=True)) == Usage(4, 6, 1, 1, estimated=True)


SETTINGS = LLMSettings()


def test_cached_tokens_cost_their_own_price() -> None:
    price = price_of("gpt-4o", SETTINGS)
    assert price.usd(Usage(1_000_000, 0)) == pytest.approx(2.5)
    assert price.usd(Usage(1_000_000, 100_000, cached_tokens=400_000)) == pytest.approx(0.6 * 2.5 + 0.4 * 1.25 + 1.0)


@pytest.mark.parametrize("name", ["gpt-4o-2024-08-06", "openai/gpt-4o", "gpt-4o-latest", "GPT-4o"])
def test_editions_cost_what_the_model_costs(name: str) -> None:
    assert price_of(name, SETTINGS) == price_of("gpt-4o", SETTINGS)


@pytest.mark.parametrize("name", ["scripted", "gpt-4o-realtime", "gpt-5.1", "my/gpt-5-finetune", ""])
def test_an_unknown_model_costs_nothing_and_says_so(name: str) -> None:
    price = price_of(name, SETTINGS)
    assert price == UNKNOWN
    assert not price.known
    assert price.usd(Usage(10**6, 10**6)) == 0


def test_settings_override_the_table() -> None:
    own = LLMSettings(price_prompt_usd_per_mtok=1.0, price_completion_usd_per_mtok=2.0)
    assert price_of("anything", own).known
    assert price_of("anything", own).usd(Usage(10**6, 10**6, cached_tokens=10**6)) == pytest.approx(3.0)
    partly = LLMSettings(price_completion_usd_per_mtok=2.0)
    assert price_of("gpt-4o", partly).usd(Usage(10**6, 10**6)) == pytest.approx(4.5)


def test_half_a_price_of_an_unknown_model_is_none() -> None:
    assert not price_of("scripted", LLMSettings(price_prompt_usd_per_mtok=1.0)).known
    own = LLMSettings(model="scripted", role_models={"critic": "gpt-4o", "actor": "mine"})
    assert unpriced(own) == ["mine", "scripted"]
