"""The command line. Exit codes: 0 done, 2 wrong usage or settings, 5 the server can't be reached or refuses, 130 interrupted.

What a command needs is imported when it runs, so that `--help` is quick.
"""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from toolserver.settings import Settings
    from toolserver.store.database import Database
    from toolserver.store.keys import Key

T = TypeVar("T")
USAGE, UNREACHABLE, INTERRUPTED = 2, 5, 130

app = typer.Typer(
    name="toolserver",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Runs tools for AI agents in sandboxes, behind an HTTP API.",
)
keys_app = typer.Typer(no_args_is_help=True, help="API keys of this server.")
sessions_app = typer.Typer(no_args_is_help=True, help="Sessions of a running server.")
tools_app = typer.Typer(no_args_is_help=True, help="The tools that sessions can have.")
images_app = typer.Typer(no_args_is_help=True, help="The container images of the tools.")
for name, group in (("keys", keys_app), ("sessions", sessions_app), ("tools", tools_app), ("images", images_app)):
    app.add_typer(group, name=name)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML).", envvar="TOOLSERVER_CONFIG")
]
StateOption = Annotated[Path | None, typer.Option("--state-dir", help="Folder of the database and the server's lock.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[str, typer.Option("--url", envvar="TOOLSERVER_URL", help="Address of the running server.")]
KeyOption = Annotated[str, typer.Option("--key", envvar="TOOLSERVER_API_KEY", help="API key.", show_envvar=True)]
RuntimeOption = Annotated[str | None, typer.Option("--runtime", help="auto, docker, bubblewrap or fake.")]
_MAX_DESCRIPTION = 110
DEFAULT_URL = "http://127.0.0.1:8500"


def _fail(message: str, code: int = USAGE) -> NoReturn:
    print(f"toolserver: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _settings(config: Path | None, state_dir: Path | None = None, **sections: dict[str, Any]) -> Settings:
    from toolserver import settings

    flags: dict[str, Any] = {name: {k: v for k, v in part.items() if v is not None} for name, part in sections.items()}
    flags = {name: part for name, part in flags.items() if part}
    if state_dir is not None:
        flags["state_dir"] = state_dir.expanduser()
    wrong = settings.unknown_variables()
    try:
        loaded = settings.load(config, **flags)
    except (OSError, ValueError) as problem:  # both of pydantic's and TOML's errors are ValueErrors
        wrong += settings.problems(problem)
    if wrong:
        _fail("Wrong settings:\n  " + "\n  ".join(wrong))
    return loaded


def _show(as_json: bool, value: Any, lines: Callable[[], list[str]]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False) if as_json else "\n".join(lines()))


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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
    log_format: Annotated[
        str | None, typer.Option(help="json, text, or auto: text on a terminal, else json.", show_default="auto")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    log = {"format": log_format, "level": log_level}
    settings = _settings(config, state_dir, http={"host": host, "port": port}, runtime={"name": runtime}, log=log)

    import uvloop

    from toolserver.app import ServeOptions, serve
    from toolserver.errors import StartRefused
    from toolserver.telemetry.logs import configure_logging

    configure_logging(settings.log.level, settings.log.format)
    options = ServeOptions(ready_file, exit_with_parent, keep_workspaces)
    try:
        uvloop.run(serve(settings, options, lambda line: print(line, file=sys.stderr, flush=True)))
    except StartRefused as problem:
        _fail(str(problem))


def _with_database(config: Path | None, state_dir: Path | None, work: Callable[[Database], T]) -> T:
    from toolserver.app import database_path
    from toolserver.errors import StartRefused, StoreUnavailable
    from toolserver.store.database import Database

    database = Database(database_path(_settings(config, state_dir).state_dir))
    try:
        database.open()
        return work(database)
    except (StartRefused, StoreUnavailable) as problem:
        _fail(str(problem))
    finally:
        database.close()


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    tenant: Annotated[str, typer.Option(help="Whose sessions and calls it sees.")] = "default",
    scope: Annotated[str, typer.Option(help="read, use or admin; each holds those before it.")] = "use",
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it. It is shown this once; the server stores only its digest."""
    from toolserver.store import keys

    if scope not in keys.SCOPES:
        _fail(f"--scope is one of {', '.join(keys.SCOPES)}")
    if not 0 < len(name) <= 128 or not 0 < len(tenant) <= 64:
        _fail("a name has 1 to 128 characters, a tenant 1 to 64")
    text = keys.new_text()
    key = _with_database(config, state_dir, lambda d: d.run(lambda c: keys.create(c, text, name, tenant, scope)))
    _show(as_json, {**_key_json(key), "key": text}, lambda: [text])


def _key_json(key: Key) -> dict[str, Any]:
    from toolserver.sessions.session import iso_time

    revoked_at = None if key.revoked_at is None else iso_time(key.revoked_at)
    return {**key.as_json(), "created_at": iso_time(key.created_at), "revoked_at": revoked_at}


@keys_app.command("list")
def keys_list(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """All keys, without their text."""
    from toolserver.app import database_path
    from toolserver.store import keys

    place = database_path(_settings(config, state_dir).state_dir)
    if not place.exists():
        print(f"toolserver: there is no server state in {place.parent} yet", file=sys.stderr)
    found = _with_database(config, state_dir, lambda d: d.run(keys.listing, writes=False)) if place.exists() else []
    rows = [["ID", "NAME", "TENANT", "SCOPE", "STATE"]]
    rows += [[k.key_id, k.name, k.tenant, k.scope, "revoked" if k.revoked_at is not None else "valid"] for k in found]
    _show(as_json, {"keys": [_key_json(key) for key in found]}, lambda: _table(rows))


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="As `keys list` shows it.")],
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key invalid; a running server refuses it within seconds."""
    from toolserver.store import keys

    if not _with_database(config, state_dir, lambda d: d.run(lambda c: keys.revoke(c, key_id))):
        _fail(f"there is no key {key_id}; `toolserver keys list` shows them")
    _show(as_json, {"key_id": key_id, "revoked": True}, lambda: [f"{key_id} is revoked"])


def _ask(method: str, url: str, key: str, path: str) -> Any:
    """One request to a running server, with the standard library: the server's extra has no HTTP client."""
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        _fail("--url starts with http:// or https://")
    request = urllib.request.Request(url.rstrip("/") + path, method=method, headers={"Authorization": f"Bearer {key}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - the scheme was checked above
            raw = answer.read()
    except urllib.error.HTTPError as problem:
        try:
            told = json.loads(problem.read())["detail"]["message"]
        except (ValueError, KeyError, TypeError):
            told = f"HTTP status {problem.code}"
        _fail(told, USAGE if problem.code in (401, 403, 404, 410, 422) else UNREACHABLE)
    except OSError as problem:
        reason = getattr(problem, "reason", problem)
        _fail(
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
    rows = [["ID", "TENANT", "CREATED", "EXPIRES", "IMAGES"]]
    rows += [
        [s["id"], s.get("tenant", "-"), s["created_at"], s["expires_at"], ",".join(s["images"])]
        for s in body["sessions"]
    ]
    _show(as_json, body, lambda: _table(rows))


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
    _show(as_json, {"removed": session_ids}, lambda: [f"{session_id} is removed" for session_id in session_ids])


def _first_sentence(text: str) -> str:
    sentence = text.strip().splitlines()[0].split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _MAX_DESCRIPTION else sentence[:_MAX_DESCRIPTION].rsplit(" ", 1)[0] + " …"


@tools_app.command("list")
def tools_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The tools of the catalog."""
    from toolserver.catalog.catalog import Catalog

    catalog = Catalog.load(_settings(config))
    found = catalog.tools(None)
    rows = [["NAME", "IMAGE", "DESCRIPTION"]]
    rows += [[tool.name, tool.image, _first_sentence(tool.description)] for tool in found]
    _show(
        as_json, {"tools": [tool.as_json() for tool in found], "problems": list(catalog.problems)}, lambda: _table(rows)
    )
    for problem in catalog.problems:
        print(f"toolserver: {problem}", file=sys.stderr)


@images_app.command("build")
def images_build(
    names: Annotated[list[str] | None, typer.Argument(help="Images to build; all by default.")] = None,
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
            names or (), base=base, docker_host=_settings(config).runtime.docker_host, progress=progress
        )
    except ImageBuildError as problem:
        _fail(str(problem), UNREACHABLE)
    rows = [["IMAGE", "REFERENCE", "ACTION", "SECONDS", "NOTE"]]
    rows += [[b.name, b.reference, b.action, f"{b.seconds:.1f}", b.note] for b in built]
    _show(as_json, {"images": [asdict(image) for image in built]}, lambda: _table(rows))


@images_app.command("list")
def images_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The images of the catalog, and whether the engine has them."""
    from toolserver.catalog.catalog import Catalog

    settings = _settings(config)
    missing = _missing_images(settings)
    images = list(Catalog.load(settings).images.values())
    built = {image.name: None if missing is None else image.name not in missing for image in images}
    states = {None: "no engine answers", True: "built", False: "missing: toolserver images build"}
    rows = [["NAME", "REFERENCE", "TOOLS", "STATE"]]
    rows += [[i.name, i.reference, str(len(i.tools)), states[built[i.name]]] for i in images]
    told = [{"name": i.name, "reference": i.reference, "tools": len(i.tools), "built": built[i.name]} for i in images]
    _show(as_json, {"images": told}, lambda: _table(rows))


def _missing_images(settings: Settings) -> list[str] | None:
    """Names of images that the engine lacks; None when no engine answers."""
    from toolserver.images.build import missing_images
    from toolserver.images.definition import ImageBuildError

    try:
        return missing_images(settings.runtime.docker_host)
    except ImageBuildError:
        return None


@app.command()
def doctor(
    config: ConfigOption = None,
    state_dir: StateOption = None,
    runtime: RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """What this host can enforce, and what stands in the way. Exit code 5 when sandboxes can't be started."""
    import asyncio

    from toolserver.app import examine

    found = asyncio.run(examine(_settings(config, state_dir, runtime={"name": runtime})))
    if found["runtime"] == "docker" and found["problem"] is None:
        for image in _missing_images(_settings(config)) or ():
            found["warnings"].append(f"The image {image} is not built: toolserver images build {image}")
    rows = [
        ["runtime", found["runtime"]],
        *([what, str(how)] for what, how in found["isolation"].items() if what != "runtime"),
    ]

    def lines() -> list[str]:
        problem = [f"problem: {found['problem']}"] if found["problem"] is not None else ["sandboxes can be started"]
        return [*_table(rows), *(f"warning: {warning}" for warning in found["warnings"]), *problem]

    _show(as_json, found, lines)
    if found["problem"] is not None:
        raise typer.Exit(UNREACHABLE)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
