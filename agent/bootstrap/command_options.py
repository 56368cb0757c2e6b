"""Options and arguments that several commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelOption = Annotated[str | None, typer.Option("--model", help="The model's name.")]
BaseUrlOption = Annotated[str | None, typer.Option("--base-url", help="An OpenAI-compatible server.")]
ToolServerOption = Annotated[
    str | None, typer.Option("--toolserver", help="A ToolServer's address; without one, one is started.")
]
RuntimeOption = Annotated[
    str | None, typer.Option("--runtime", help="Sandboxes of a ToolServer started here: auto, docker, bubblewrap.")
]
EgressOption = Annotated[
    str | None, typer.Option("--egress", help="open: tools and their code may reach public addresses. Default: none.")
]
UsdOption = Annotated[float | None, typer.Option("--max-usd", help="Stop before the run costs more dollars.")]
TokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Stop before the run uses more tokens.")]
SecondsOption = Annotated[float | None, typer.Option("--max-seconds", help="Stop after as many seconds of work.")]
LlmCallsOption = Annotated[int | None, typer.Option("--max-llm-calls", help="Stop before more requests to the model.")]
ToolCallsOption = Annotated[int | None, typer.Option("--max-tool-calls", help="Stop before more tool calls.")]
RunsDirOption = Annotated[Path | None, typer.Option("--runs-dir", help="Where runs are kept; ./runs without it.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="A settings file (TOML).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or the start of it.")]
