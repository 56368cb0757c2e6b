from __future__ import annotations

import io

import pytest
from rich.console import Console

from agent.budget import Allowances, Budget
from agent.errors import BudgetExhausted
from agent.events import Event, EventKind
from agent.report.figures import count, money
from agent.report.story import tell
from agent.report.terminal import option_that_ran_out, print_end
from agent.store.hash_chain import GENESIS, seal
from tests.unit.report.journal_example import full_run


def test_one_is_singular() -> None:
    assert [count(number, "tool call") for number in (0, 1, 1200)] == [
        "0 tool calls",
        "1 tool call",
        "1,200 tool calls",
    ]


def test_an_unknown_price_is_not_told_as_no_cost() -> None:
    assert money(0.0, known=True) == "$0.0000"
    assert money(0.0, known=False) == "cost unknown"
    assert money(1.5, known=False) == "at least $1.5000"


def replied(usd: float | None) -> Event:
    usage = {"prompt_tokens": 5, "completion_tokens": 5}
    data = {"key": "plan/generator/r0", "role": "plan_generator", "model": "m", "usage": usage, "usd": usd, "reply": {}}
    return seal("r", 1, 0.0, EventKind.LLM_REPLIED, data, prev_hash=GENESIS)[0]


@pytest.mark.parametrize(("usd", "known"), [(None, False), (0.0, True), (0.1, True)])
def test_a_story_knows_whether_all_prices_were_known(usd: float | None, known: bool) -> None:
    assert tell([replied(usd)]).usd_known is known


def reasons() -> list[tuple[str, str]]:
    """What the budget really says when each of its allowances is used up, and the option that raises it."""
    told = []
    for allowances, option in (
        (Allowances(0, 9), "--max-llm-calls N"), (Allowances(9, 0), "--max-tool-calls N"), (Allowances(9, 9, tokens=1), "--max-tokens N"),
        (Allowances(9, 9, usd=0.1), "--max-usd X"), (Allowances(9, 9, seconds=0.0), "--max-seconds S"),
    ):  # fmt: skip
        budget = Budget(allowances)
        with pytest.raises(BudgetExhausted) as stopped:
            budget.reserve_tool_call() if allowances.tool_calls == 0 else budget.reserve_llm(
                100, 100, lambda p, c: p + c
            )
        told.append((stopped.value.message, option))
    return told


def test_the_hint_names_the_option_of_the_allowance_that_ran_out() -> None:
    for reason, option in reasons():
        assert option_that_ran_out(reason) == option
    assert option_that_ran_out("the model is gone") == ""


def test_the_hint_is_the_command_that_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    reason, _ = reasons()[0]
    cost = {"llm_calls": 1, "tool_calls": 1, "tokens": 1, "usd": 0.0}
    result = {
        "run_id": "r-1", "state": "stopped", "exit_code": 3, "reason": reason, "answer": "", "seconds": 1.0, "artifacts": [],
        "costs": {"total": cost, "usd_known": False},
    }  # fmt: skip
    out = io.StringIO()
    again = "agent resume r-1 --runs-dir /somewhere"
    print_end(Console(file=io.StringIO()), Console(file=out, width=200), tmp_path_factory.mktemp("run"), result, again)
    told = out.getvalue()
    assert "1 model call, 1 tool call, 1 token, cost unknown" in told
    assert "To go on with a higher budget: agent resume r-1 --runs-dir /somewhere --max-llm-calls N" in told


def test_the_example_of_these_tests_has_known_prices() -> None:
    assert tell(full_run()).usd_known
