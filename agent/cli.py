"""The command line of the agent. Commands import what they need when they run, so that `--help` is quick.

Exit codes: 0 done, 1 the goal failed, 2 wrong usage or settings, 3 stopped by a budget, 4 waiting for a person, 5 the
ToolServer or the model can't be reached, 130 interrupted.
"""

# Commands have many options, and import late on purpose:
# ruff: noqa: PLC0415, PLR0917

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agent.bootstrap.command_options import (
    BaseUrlOption,
    ConfigOption,
    EgressOption,
    JsonOption,
    LlmCallsOption,
    ModelOption,
    QuietOption,
    RunArgument,
    RunsDirOption,
    RuntimeOption,
    SecondsOption,
    TokensOption,
    ToolCallsOption,
    ToolServerOption,
    UsdOption,
)
from agent.bootstrap.options import budget_of, flags_of, how_to_resume, need_model, read_settings
from agent.errors import AgentError, RunNotFound, UsageProblem

if TYPE_CHECKING:
    from rich.console import Console

    from agent.bootstrap.composition import Finished
    from agent.bootstrap.interrupts import Interrupts
    from agent.report.live import Progress
    from agent.settings import Settings

app = typer.Typer(
    name="agent", help="Works towards a goal: plans, calls tools in sandboxes, never loses or repeats work.",
    no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip


def _print_version(wanted: bool = True) -> None:
    from importlib.metadata import version as installed

    if wanted:
        print(installed("toolcrib"))
        raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version)]


@app.callback()
def program(_version: VersionOption = False) -> None:
    """Works towards a goal: plans, calls tools in sandboxes, never loses or repeats work."""


@app.command()
def run(
    goal: Annotated[str, typer.Argument(metavar="GOAL", help="What is to be achieved, in words.")],
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file for the run's workspace; may be repeated.")
    ] = None,
    model: ModelOption = None,
    base_url: BaseUrlOption = None,
    toolserver: ToolServerOption = None,
    runtime: RuntimeOption = None,
    egress: EgressOption = None,
    max_usd: UsdOption = None,
    max_tokens: TokensOption = None,
    max_seconds: SecondsOption = None,
    max_llm_calls: LlmCallsOption = None,
    max_tool_calls: ToolCallsOption = None,
    runs_dir: RunsDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Work towards GOAL and print the answer."""
    from agent.bootstrap import inputs

    budget = budget_of(max_usd, max_tokens, max_seconds, max_llm_calls, max_tool_calls)

    def begin(settings: Settings, console: Console) -> _Work:
        if not goal.strip():
            raise UsageProblem("The goal is empty: say what is to be achieved.")
        need_model(settings)
        files = inputs.check(file or [])
        from agent.bootstrap import composition
        from agent.bootstrap.doctor import answering

        bound, most = composition.limits(settings)
        _say(console, f"At most {most.llm_calls:,} model calls and {most.tool_calls:,} tool calls"
                      + ("." if most.llm_calls == bound.llm_calls else f" (without the budget {bound.llm_calls:,} and {bound.tool_calls:,})."))  # fmt: skip
        _say_start(settings, console)

        async def work(progress: Progress, interrupts: Interrupts) -> Finished:
            await answering(settings)
            return await composition.start(settings, goal, files, progress, interrupts)

        return work

    flags = flags_of(
        model=model, base_url=base_url, toolserver=toolserver, runtime=runtime, egress=egress, runs_dir=runs_dir,
        budget=budget,
    )  # fmt: skip
    raise typer.Exit(_carry_out(begin, config, flags, as_json=as_json, quiet=quiet))


@app.command()
def resume(
    run_id: RunArgument,
    model: ModelOption = None,
    base_url: BaseUrlOption = None,
    toolserver: ToolServerOption = None,
    runtime: RuntimeOption = None,
    egress: EgressOption = None,
    max_usd: UsdOption = None,
    max_tokens: TokensOption = None,
    max_seconds: SecondsOption = None,
    max_llm_calls: LlmCallsOption = None,
    max_tool_calls: ToolCallsOption = None,
    runs_dir: RunsDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with a run that was stopped, interrupted or killed. The run's own budget holds, but for the options given here."""
    raised = budget_of(max_usd, max_tokens, max_seconds, max_llm_calls, max_tool_calls)

    def begin(settings: Settings, console: Console) -> _Work:
        from agent.bootstrap import composition
        from agent.bootstrap.places import is_over

        going_on, what = composition.plan_resume(settings, run_id, raised)
        over = is_over(settings, run_id)
        if not over:
            need_model(going_on)
        _say(console, what)
        if not over:
            _say_start(settings, console)
        return lambda progress, interrupts: composition.resume(going_on, run_id, progress, interrupts)

    flags = flags_of(
        model=model, base_url=base_url, toolserver=toolserver, runtime=runtime, egress=egress, runs_dir=runs_dir
    )
    raise typer.Exit(_carry_out(begin, config, flags, as_json=as_json, quiet=quiet))


@app.command("list")
def list_runs(runs_dir: RunsDirOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All runs, newest first."""
    from agent.bootstrap.places import open_store
    from agent.report.overview import lines_of, runs_table

    def body(settings: Settings) -> None:
        try:
            with open_store(settings, create=False) as store:
                lines = lines_of(store)
        except RunNotFound:
            lines = []
        if as_json:
            print(json.dumps([line.as_json() for line in lines], ensure_ascii=False))
        elif lines:
            _console(stderr=False).print(runs_table(lines))
        else:
            print(f"No runs in {settings.runs_dir.absolute()}.")

    _inspect(body, config, runs_dir)


@app.command()
def show(
    run_id: RunArgument, runs_dir: RunsDirOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """A run's plan, steps, costs and answer."""
    from agent.bootstrap.places import folder_of, open_store, seen_from_outside
    from agent.report import folder
    from agent.report.artifacts import manifest
    from agent.report.story import tell
    from agent.report.terminal import print_run

    def body(settings: Settings) -> None:
        with open_store(settings, create=False) as store:
            story = tell(store.read(run_id))
            story.run.state = seen_from_outside(store, story.run)
        files = manifest(story, folder_of(settings, story.run.run_id) / folder.WORKSPACE)
        if as_json:
            print(json.dumps(folder.result_of(story, files), ensure_ascii=False, indent=2))
        else:
            print_run(_console(stderr=False), story, files)

    _inspect(body, config, runs_dir)


@app.command()
def report(
    run_id: RunArgument,
    runs_dir: RunsDirOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write it; into the run's folder without it.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = False,
) -> None:
    """Make a run's HTML report again, from its journal and workspace, and print where it is."""
    from agent.bootstrap.places import folder_of, open_store
    from agent.report import folder

    def body(settings: Settings) -> None:
        with open_store(settings, create=False) as store:
            events = store.read(run_id)
        place = folder_of(settings, events[0].run_id) if events else folder_of(settings, run_id)
        target = out or place / folder.REPORT
        if out is not None and not out.absolute().parent.is_dir():
            raise UsageProblem(f"there is no folder {out.absolute().parent}: make it first")
        folder.write_report(place, events, target)
        print(target)
        if open_it:
            typer.launch(str(target))

    _inspect(body, config, runs_dir)


@app.command()
def mock(
    script: Annotated[Path, typer.Argument(help="A script; see docs/reference/mock-scripts.md.")],
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.")] = 8600,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Gets url and pid as JSON once it answers.")
    ] = None,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="End when standard input closes.")
    ] = False,
) -> None:
    """Serve a scripted model as an OpenAI-compatible server, for demos and tests."""
    from agent.bootstrap.mock_process import end_with_standard_input, tell_ready
    from agent.llm.mock_script import ScriptInvalid
    from agent.llm.mock_server import serve

    if exit_with_parent:
        end_with_standard_input()
    try:
        serve(script, host, port, on_ready=lambda url: tell_ready(url, ready_file))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ScriptInvalid as problem:
        _fail(UsageProblem(str(problem)))
    except OSError as problem:
        _fail(
            UsageProblem(
                f"can't serve on {host}:{port}: {problem.strerror or problem}; choose another --port, or 0 for a free one"
            )
        )


@app.command()
def doctor(
    model: ModelOption = None,
    base_url: BaseUrlOption = None,
    toolserver: ToolServerOption = None,
    runtime: RuntimeOption = None,
    runs_dir: RunsDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try what a run needs: settings, runs folder, model, ToolServer, a sandbox. The exit code is that of the first failure."""
    from agent.bootstrap.doctor import examine
    from agent.report.terminal import print_checks

    try:
        settings = read_settings(
            config, flags_of(model=model, base_url=base_url, toolserver=toolserver, runtime=runtime, runs_dir=runs_dir)
        )
        checks = asyncio.run(examine(settings))
    except AgentError as problem:
        _fail(problem, as_json=as_json)
    if as_json:
        print(json.dumps({"ok": all(check.ok for check in checks), "checks": [check.as_json() for check in checks]}))
    else:
        print_checks(_console(stderr=False), checks)
    raise typer.Exit(next((check.exit_code for check in checks if not check.ok), 0))


@app.command()
def version() -> None:
    """Print the version."""
    _print_version()


def main() -> None:
    app()


_Work = Callable[["Progress", "Interrupts"], "Awaitable[Finished]"]


def _carry_out(
    begin: Callable[[Settings, Console], _Work],
    config: Path | None,
    flags: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Do a run's work with progress on standard error and its result on standard output. Returns the exit code."""
    console = _console(stderr=True, quiet=quiet)
    try:
        settings = read_settings(config, flags)
        _log_to(console)
        finished = asyncio.run(_with_progress(begin(settings, console), console, quiet=quiet))
    except AgentError as problem:
        _fail(problem, as_json=as_json)
    except asyncio.CancelledError:
        _say(console, "Interrupted before the work had begun.")
        return 130
    except OSError as problem:
        _fail(UsageProblem(f"The run's folder can't be written: {problem}"), as_json=as_json)
    if as_json:
        print(json.dumps({**finished.result, "folder": str(finished.folder)}, ensure_ascii=False, indent=2))
    else:
        from agent.report.terminal import print_end

        again = how_to_resume(settings, flags, finished.result["run_id"])
        print_end(_console(stderr=False), console, finished.folder, finished.result, again)
    return finished.exit_code


async def _with_progress(work: _Work, console: Console, *, quiet: bool) -> Finished:
    from agent.bootstrap.interrupts import interrupts
    from agent.report.live import Silent, progress

    with interrupts(lambda text: _say(console, text)) as handler:
        if quiet:
            return await work(Silent(), handler)
        async with progress(console) as shown:
            return await work(shown, handler)


def _inspect(body: Callable[[Settings], None], config: Path | None, runs_dir: Path | None) -> None:
    try:
        body(read_settings(config, flags_of(runs_dir=runs_dir)))
    except AgentError as problem:
        _fail(problem)
    except OSError as problem:
        _fail(UsageProblem(str(problem)))


def _say_start(settings: Settings, console: Console) -> None:
    """What the wait is for that follows."""
    if settings.toolserver.url is None:
        _say(console, f"Starting a ToolServer ({settings.toolserver.runtime}) …")


def _console(*, stderr: bool, quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _log_to(console: Console) -> None:
    """Warnings go through the console, so that they don't tear the live picture."""
    import logging

    from rich.logging import RichHandler

    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, markup=False)],
    )


def _fail(problem: Exception, *, as_json: bool = False) -> NoReturn:
    """Say what is wrong on standard error (with `--json` on standard output too) and end with its exit code."""
    code = problem.exit_code if isinstance(problem, AgentError) else UsageProblem.exit_code
    print(f"agent: {problem}", file=sys.stderr)
    if as_json:
        print(
            json.dumps({"schema": 1, "run_id": None, "state": "not_started", "exit_code": code, "reason": str(problem)})
        )
    raise typer.Exit(code) from None
