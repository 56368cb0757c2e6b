"""A run's report as one HTML file that needs nothing else: no script, no font, no request; the page's own policy forbids them.

A pure function of the story, the manifest and the workspace's pictures: the same run gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from agent.budget import Cost
from agent.report.artifacts import Manifest
from agent.report.call_view import MAX_TEXT, call_view, pretty
from agent.report.figures import duration, money, size
from agent.report.markdown import as_html
from agent.report.pictures import Album, Picture
from agent.report.plain_text import clipped, visible
from agent.report.story import Spending, Story

_INLINE = "pictures/"  # where the workspace keeps pictures that calls gave inline
_TEMPLATES = Path(__file__).parent / "templates"


def render(story: Story, files: Manifest, workspace: Path) -> str:
    """The page. `workspace` is where `files` lie; pictures that are gone or too large are named instead."""
    album = Album()
    style = (_TEMPLATES / "report.css").read_text("utf-8")
    template = _environment().get_template("report.html.j2")
    return template.render(
        story=story,
        files=files,
        gallery=_gallery(files, workspace, album),
        view=call_view(album),
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii"),
        limits=_limits(story),
        tables=_tables(story),
        errors=_errors(story),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "offset": _offset,
        "duration": duration,
        "moment": lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "markdown": as_html,
        "visible": lambda text: visible(str(text)),
        "clip": lambda text: clipped(str(text), MAX_TEXT),
        "pretty": pretty,
        "thousands": lambda number: f"{number:,}",
        "usd": lambda amount, known: money(amount, known=known),
        "size": size,
    }
    return environment


@pass_context
def _offset(context: Context, at: float) -> str:
    """How long after the run's start."""
    story: Story = context["story"]
    return f"+{duration((at - story.run.started_at) * 1000)}"


def _gallery(files: Manifest, workspace: Path, album: Album) -> list[Picture]:
    """Pictures that were made as files; those that a call gave inline stand with the call."""
    made = [entry.path for entry in files.artifacts if not entry.input and entry.media_type.startswith("image/")]
    paths = [path for path in made if not path.startswith(_INLINE)]
    found = [album.from_workspace(workspace, path) for path in paths]
    return [picture for picture in found if picture is not None]


def _errors(story: Story) -> list[tuple[str, str, str]]:
    """(place, title, text) of all that went wrong: calls that did not succeed, and the model's failures."""
    calls = [(call, call.outcome or {}) for call in story.calls() if not call.ok]
    found = [
        (call.key, f"{call.tool}: {outcome.get('kind')} ({outcome.get('code')})", call.observation)
        for call, outcome in calls
    ]
    steps = [step for attempt in story.attempts() for step in attempt.steps.values() if step.problem]
    found += [(step.key, "The model failed the actor", step.problem) for step in steps]
    return found + [
        (turn.key, f"The model failed {turn.role}", turn.failure) for turn in story.turns.values() if turn.failure
    ]


def _tables(story: Story) -> list[tuple[str, list[tuple[str, Cost, Spending | None]]]]:
    roles = [(role, story.cost_of_role(role), spent) for role, spent in story.spending.items()]
    roles.sort(key=lambda row: (-row[1].tokens, row[0]))
    tasks = [(f"{node.id} {node.goal}", story.run.cost_of(node.id), None) for node in story.run.plan.walk()]
    return [("Role", [*roles]), ("Task", [*tasks])]


def _limits(story: Story) -> list[tuple[str, float, float, str]]:
    """(name, used, limit, where the limit comes from) of every allowance that the run had."""
    run, budget = story.run, story.run.settings.get("budget") or {}
    rows = [
        ("model calls", run.cost.llm_calls, budget.get("max_llm_calls"), run.bound.llm_calls),
        ("tool calls", run.cost.tool_calls, budget.get("max_tool_calls"), run.bound.tool_calls),
        ("tokens", run.cost.tokens, budget.get("max_tokens"), None),
        ("US dollars", run.cost.usd, budget.get("max_usd"), None),
        ("seconds", run.seconds, budget.get("max_seconds"), None),
    ]
    named = [
        (name, used, *((limit, "budget") if limit else (bound, "bound of the run")))
        for name, used, limit, bound in rows
    ]
    return [(name, float(used), float(limit), source) for name, used, limit, source in named if limit]
