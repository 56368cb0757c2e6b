import json
from pathlib import Path
from typing import Any

import pytest

from agent.llm.mock_reply import Planned
from agent.llm.mock_request import Asked, ScriptProblem, render
from agent.llm.mock_script import Memory, Script, ScriptInvalid, load_script, parse_script


def asked(*messages: tuple[str, str], role: str = "actor", tools: tuple[str, ...] = ()) -> Asked:
    body = {
        "messages": [{"role": who, "content": text} for who, text in messages],
        "tools": [{"type": "function", "function": {"name": name}} for name in tools],
    }
    return Asked.from_body(body, role)


def script(*rules: dict[str, Any]) -> Script:
    return parse_script({"rule": [{"name": f"r{number}", **rule} for number, rule in enumerate(rules)]})


def text(of: Script, request: Asked, memory: Memory | None = None) -> str:
    return of.choose(request, memory or Memory())[1].text


GO = ("user", "Goal: plot the rain")


def test_the_first_rule_whose_conditions_all_hold_answers() -> None:
    both = script(
        {"role": "critic", "reply": [{"text": "critic"}]},
        {"role": ["actor", "reflector"], "goal": "rain", "tools": ["plot"], "reply": [{"text": "plot"}]},
        {"goal": "(?i)RAIN", "reply": [{"text": "any"}]},
    )
    assert text(both, asked(GO, role="critic")) == "critic"
    assert text(both, asked(GO, tools=("plot", "read"))) == "plot"
    assert text(both, asked(GO, tools=("read",))) == "any"


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"system": "careful"}, True), ({"system": "rain"}, False), ({"last": "3 rows"}, True), ({"last": "rain"}, False),
        ({"tool": "3 rows"}, True), ({"tool": "1 row"}, False), ({"any": "looking"}, True), ({"turn": 1}, True),
        ({"turn": [0, 2]}, False), ({"goal": "^Goal: plot"}, True), ({"role": "critic"}, False),
    ],
)  # fmt: skip
def test_conditions_read_the_conversation(condition: dict[str, Any], holds: bool) -> None:
    request = asked(("system", "Be careful."), GO, ("assistant", "looking"), ("tool", "1 row"), ("tool", "3 rows"))
    answers = script(
        {**condition, "reply": [{"text": "yes"}], "on_exhausted": "repeat"},
        {"reply": [{"text": "no"}], "on_exhausted": "repeat"},
    )
    assert text(answers, request) == ("yes" if holds else "no")


def test_replies_follow_the_turns_of_the_conversation_not_the_memory_of_the_server() -> None:
    three = script({"reply": [{"text": "one"}, {"text": "two"}, {"text": "three"}]})
    turns = [asked(GO, *[("assistant", "x"), ("tool", "y")] * turn) for turn in range(3)]
    # A restarted server, asked again in any order, says the same.
    assert [text(three, turn) for turn in (*turns, turns[1], turns[0])] == ["one", "two", "three", "two", "one"]
    assert text(script({"from_turn": 2, "reply": [{"text": "late"}]}), turns[2]) == "late"


def test_a_script_that_has_ended_fails_loudly_unless_told_to_repeat() -> None:
    request = asked(GO, ("assistant", "x"), ("tool", "the last result"))
    with pytest.raises(ScriptProblem, match=r"'r0' has 1 replies and was asked for number 2.*the last result"):
        text(script({"reply": [{"text": "one"}]}), request)
    assert text(script({"reply": [{"text": "one"}], "on_exhausted": "repeat"}), request) == "one"


def test_a_request_that_no_rule_foresees_is_named() -> None:
    with pytest.raises(ScriptProblem, match=r"no rule matches.*role 'critic'.*plot the rain"):
        text(script({"role": "actor", "reply": [{"text": "x"}]}), asked(GO, role="critic"))


def test_an_occurrence_counts_different_requests_and_sending_one_again_is_none() -> None:
    memory = Memory()
    twice = script({"occurrence": 1, "reply": [{"text": "first"}]}, {"reply": [{"text": "later"}]})
    one, two = asked(GO), asked(("user", "another goal"))
    assert [text(twice, request, memory) for request in (one, one, two, one, two)] == [
        "first",
        "first",
        "later",
        "first",
        "later",
    ]


HISTORY = asked(
    ("system", "You are careful."), GO, ("assistant", "I add up."), ("tool", "total=17 rows=3\npath a/b.csv"), ("tool", "TOTAL=42"), role="actor"
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("The total is {{tool:/total=(\\d+)/}}.", "The total is 17."),
        ("{{tool:/total=(\\d+)/i}}", "42"),
        ("{{ tool:/rows=\\d/ }}", "rows=3"),
        ("{{tool:/a\\/(b)\\.csv/}}", "b"),
        ("{{user:/plot the (\\w+)/}}", "rain"),
        ("{{system:/careful/}}", "careful"),
        ("{{assistant:/I (.+)\\./}}", "add up"),
        ("{{last:/=(\\d+)/}} of {{any:/rows=(\\d)/}}", "42 of 3"),
        ("{{tool:/total=(\\d+)/i|int}}", 42),
        ("{{tool:/total=(\\d+)/i|float}}", 42.0),
        ("try {{turn}} as {{role}}", "try 1 as actor"),
        ("f'{{x}} {y} {{tool: no}}'", "f'{{x}} {y} {{tool: no}}'"),
    ],
)
def test_templates_read_values_out_of_the_conversation(template: str, value: Any) -> None:
    assert render({"deep": [template]}, HISTORY) == {"deep": [value]}


def test_a_template_that_finds_nothing_or_the_wrong_kind_fails_loudly() -> None:
    with pytest.raises(ScriptProblem, match="finds nothing"):
        render("{{tool:/mean=(.+)/}}", HISTORY)
    with pytest.raises(ScriptProblem, match="int"):
        render("{{user:/plot (.+)/|int}}", HISTORY)


def test_calls_carry_rendered_arguments_and_ids_that_do_not_change() -> None:
    calls = script(
        {
            "reply": [
                {
                    "call": [
                        {"name": "f", "arguments": {"n": "{{tool:/rows=(\\d)/|int}}"}},
                        {"name": "g", "arguments_text": "{oops"},
                    ]
                }
            ],
            "on_exhausted": "repeat",
        }
    )
    first: Planned = calls.choose(HISTORY, Memory())[1]
    assert [(call.name, call.arguments) for call in first.calls] == [("f", '{"n": 3}'), ("g", "{oops")]
    assert first.calls == calls.choose(HISTORY, Memory())[1].calls
    assert first.calls[0].id != first.calls[1].id


TOML = """
model = "scripted"
quirks = [{ name = "rate_limited", sends = 1, retry_after = "1" }]
[[rule]]
name = "act"
role = "actor"
quirks = "stop_with_calls"
  [[rule.reply]]
  text = "I compute."
    [[rule.reply.call]]
    name = "python_execute"
      [rule.reply.call.arguments]
      code = '''
import math
print(f"pi is {math.pi:.3f}\\n")
'''
"""


def test_a_toml_script_keeps_code_as_written_and_json_does_too(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(TOML)
    loaded = load_script(tmp_path / "s.toml")
    assert loaded.rule[0].reply[0].call[0].arguments["code"] == 'import math\nprint(f"pi is {math.pi:.3f}\\n")\n'
    (tmp_path / "s.json").write_text(json.dumps(loaded.model_dump()))
    assert load_script(tmp_path / "s.json") == loaded


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rule = [", "no valid toml"),
        ("[[rule]]\nname='a'\nreplies=[]", "replies"),
        ("[[rule]]\nname='a'", "neither a reply nor a quirk"),
        ("rule = []", "rule"),
        ("[[rule]]\nname='a'\nlast='('\n[[rule.reply]]\ntext='x'", "regular expression"),
        ("[[rule]]\nname='a'\nquirks=['explode']", "no quirk 'explode'"),
        ("version = 2\n[[rule]]\nname='a'\nquirks=['empty']", "version"),
    ],
)
def test_a_script_against_the_format_is_refused_with_the_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(content)
    with pytest.raises(ScriptInvalid, match=words):
        load_script(path)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptInvalid, match="can't be read"):
        load_script(tmp_path / "none.toml")
