"""The command line. Exit codes: 0 done, 1 the journal is not as it was written, 2 wrong usage or settings, 5 the server can't be reached or refuses, 130 interrupted.

What a command needs is imported when it runs, so that `--help` is quick.
"""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolserver.commands import doctor, journal, keys, tenants, tools
from toolserver.commands.doctor import RuntimeOption
from toolserver.commands.terminal import (
    INTERRUPTED,
    UNREACHABLE,
    USAGE,
    ConfigOption,
    JsonOption,
    StateOption,
    fail,
    load_settings,
    show,
    table,
)

if TYPE_CHECKING:
    from toolserver.settings import Settings

app = typer.Typer(
    name="toolserver",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Runs tools for AI agents in sandboxes, behind an HTTP API.",
)
sessions_app = typer.Typer(no_args_is_help=True, help="Sessions of a running server.")
images_app = typer.Typer(no_args_is_help=True, help="The container images of the tools.")
_GROUPS = {
    "keys": keys.app,
    "tenants": tenants.app,
    "journal": journal.app,
    "sessions": sessions_app,
    "tools": tools.app,
    "images": images_app,
}
for name, group in _GROUPS.items():
    app.add_typer(group, name=name)

UrlOption = Annotated[str, typer.Option("--url", envvar="TOOLSERVER_URL", help="Address of the running server.")]
KeyOption = Annotated[str, typer.Option("--key", envvar="TOOLSERVER_API_KEY", help="API key.", show_envvar=True)]
DEFAULT_URL = "http://127.0.0.1:8500"


def _print_version(wanted: bool) -> None:
    from importlib.metadata import version as installed

    if wanted:
        print(installed("toolcrib"))
        raise typer.Exit


@app.callback()
def program(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Runs tools for AI agents in sandboxes, behind an HTTP API."""


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (127.0.0.1). Others need an explicit API key.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8500); 0 for any free one.")] = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    runtime: RuntimeOption = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write {url, pid} as JSON there once requests are taken.")
    ] = None,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", help="Shut down when stdin ends.")] = False,
    keep_workspaces: Annotated[
        Path | None,
        typer.Option(
            help="Folder that gets <session id>.tar, the workspace of each session that the shutdown ends. "
            "Without it they are deleted."
        ),
    ] = None,
    keep_sessions: Annotated[
        bool,
        typer.Option("--keep-sessions", help="A shutdown leaves the sessions to the next start on this state folder."),
    ] = False,
    usual_tools: Annotated[
        bool,
        typer.Option(
            "--usual-tools",
            help="With --state-dir: offer the images of the usual state folder, to which `toolserver tools add` adds without "
            "--state-dir.",
        ),
    ] = False,
    log_format: Annotated[
        str | None, typer.Option(help="json, text, or auto: text on a terminal, else json.", show_default="auto")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    log = {"format": log_format, "level": log_level}
    session = {"at_shutdown": "keep" if keep_sessions else None}
    http = {"host": host, "port": port}
    settings = load_settings(config, state_dir, http=http, runtime={"name": runtime}, log=log, session=session)

    import uvloop

    from toolserver.errors import StartRefused
    from toolserver.serving import ServeOptions, serve
    from toolserver.telemetry.logs import configure_logging

    configure_logging(settings.log.level, settings.log.format)
    usual = load_settings(config).state_dir if usual_tools else settings.state_dir
    elsewhere = usual if usual.resolve() != settings.state_dir.resolve() else None
    options = ServeOptions(ready_file, exit_with_parent, keep_workspaces, elsewhere)
    try:
        uvloop.run(serve(settings, options, lambda line: print(line, file=sys.stderr, flush=True)))
    except StartRefused as problem:
        fail(str(problem))


def _ask(method: str, url: str, key: str, path: str) -> Any:
    """One request to a running server, with the standard library: the server's extra has no HTTP client."""
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        fail("--url starts with http:// or https://")
    request = urllib.request.Request(url.rstrip("/") + path, method=method, headers={"Authorization": f"Bearer {key}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - the scheme was checked above
            raw = answer.read()
    except urllib.error.HTTPError as problem:
        try:
            told = json.loads(problem.read())["detail"]["message"]
        except (ValueError, KeyError, TypeError):
            told = f"HTTP status {problem.code}"
        fail(told, USAGE if problem.code in (401, 403, 404, 410, 422) else UNREACHABLE)
    except OSError as problem:
        reason = getattr(problem, "reason", problem)
        fail(
            f"the server at {url} can't be reached: {reason}. Start one with `toolserver serve`, or name another with --url "
            "or TOOLSERVER_URL",
            UNREACHABLE,
        )
    return json.loads(raw) if raw else None


@sessions_app.command("list")
def sessions_list(
    key: KeyOption,
    url: UrlOption = DEFAULT_URL,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Of every tenant; needs an admin key.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The live sessions."""
    body = _ask("GET", url, key, "/v1/sessions" + ("?all_tenants=true" if all_tenants else ""))
    rows = [["ID", *(["TENANT"] if all_tenants else []), "CREATED", "EXPIRES", "IMAGES"]]
    rows += [
        [s["id"], *([s["tenant"]] if all_tenants else []), s["created_at"], s["expires_at"], ",".join(s["images"])]
        for s in body["sessions"]
    ]
    show(as_json, body, lambda: table(rows))


@sessions_app.command("remove")
def sessions_remove(
    session_ids: Annotated[list[str], typer.Argument(help="As `sessions list` shows them.")],
    key: KeyOption,
    url: UrlOption = DEFAULT_URL,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Of any tenant; needs an admin key.")] = False,
    as_json: JsonOption = False,
) -> None:
    """End sessions and delete their files."""
    from urllib.parse import quote

    for session_id in session_ids:
        query = "?all_tenants=true" if all_tenants else ""
        _ask("DELETE", url, key, f"/v1/sessions/{quote(session_id, safe='')}{query}")
    show(as_json, {"removed": session_ids}, lambda: [f"{session_id} is removed" for session_id in session_ids])


@images_app.command("build")
def images_build(
    names: Annotated[list[str] | None, typer.Argument(help="Images to build; the usual ones by default.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Optional images too: browser.")] = False,
    base: Annotated[str | None, typer.Option(help="Image with Python 3 to stand on.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the tool images. What is up to date is left alone."""
    from dataclasses import asdict

    from toolserver.images.build import build_images
    from toolserver.images.definition import ImageBuildError

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        built = build_images(
            names or (),
            optional=everything,
            base=base,
            docker_host=load_settings(config).runtime.docker_host,
            progress=progress,
        )
    except ImageBuildError as problem:
        fail(str(problem), UNREACHABLE)
    rows = [["IMAGE", "REFERENCE", "ACTION", "SECONDS", "NOTE"]]
    rows += [[b.name, b.reference, b.action, f"{b.seconds:.1f}", b.note] for b in built]
    show(as_json, {"images": [asdict(image) for image in built]}, lambda: table(rows))


@images_app.command("list")
def images_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The images that come with Toolcrib, and whether the engine has them as they are now."""
    from toolserver.catalog.catalog import Catalog
    from toolserver.images.definition import definitions

    settings = load_settings(config)
    catalog = Catalog.load(settings).images
    state = _image_states(settings)
    told = []
    for name, definition in definitions().items():
        tools = len(catalog[name].tools) if name in catalog else 0
        built = None if state is None else state.get(name) != "missing"
        up_to_date = None if state is None or (definition.optional and not built) else name not in state
        told.append(
            {"name": name, "reference": definition.tagged, "tools": tools, "built": built, "up_to_date": up_to_date}
        )
    rows = [["NAME", "REFERENCE", "TOOLS", "STATE"]]
    for one in told:
        name = str(one["name"])
        said = "no engine answers" if state is None else state.get(name, "built")
        advice = f": toolserver images build {name}" if said in ("missing", "out of date") else ""
        rows.append([name, str(one["reference"]), str(one["tools"]), said + advice])
    show(as_json, {"images": told}, lambda: table(rows))


def _image_states(settings: Settings) -> dict[str, str] | None:
    """Names of images that the engine lacks or has of other files; None when no engine answers."""
    from toolserver.images.build import missing_images, outdated_images
    from toolserver.images.definition import ImageBuildError

    try:
        missing = missing_images(settings.runtime.docker_host)
        outdated = outdated_images(settings.runtime.docker_host)
    except ImageBuildError:
        return None
    return {**dict.fromkeys(outdated, "out of date"), **dict.fromkeys(missing, "missing")}


app.command("doctor")(doctor.doctor)


def main() -> None:
    logging.getLogger("toolserver").addHandler(logging.NullHandler())  # commands say themselves what went wrong
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
