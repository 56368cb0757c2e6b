"""Values as pictures, HTML, tables and text, the way notebooks show them."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec

from sandbox_images.base.annotations import Any

Send = Callable[[str, bytes, str], None]  # media type, data, "display" or "result"
TABLE = "application/vnd.toolcrib.table+json"
MAX_TABLE_ROWS, MAX_RESULT_CHARS = 200, 16 << 20
METHODS = (
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
)
PLAIN = frozenset((int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset))  # have no rich forms
BACKEND = "toolcrib_figures"


class FigureBackend:
    """Finds our matplotlib backend when matplotlib asks for it, so that matplotlib is imported by the user's code, not by ours."""

    def __init__(self, displays: Displays) -> None:
        self._displays = displays

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == BACKEND else None  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415

        module.__dict__.update(FigureCanvas=FigureCanvasAgg, show=self._displays.show)


class Displays:
    def __init__(self, send: Send) -> None:
        self._send = send
        os.environ["MPLBACKEND"] = f"module://{BACKEND}"
        sys.meta_path.append(FigureBackend(self))

    def show(self, *_args: Any, **_options: Any) -> None:
        """What `plt.show()` does."""
        self.flush_figures()

    def display(self, *values: Any, **_options: Any) -> None:
        """Show values now, in the middle of the code."""
        sys.stdout.flush()
        for value in values:
            text = self._rich(value, "display")
            if text:
                self._send("text/plain", text.encode("utf-8", "backslashreplace"), "display")

    def result(self, value: Any) -> str:
        """Show the last expression's value; its text. What its repr raises passes through."""
        return self._rich(value, "result") or ""

    def _rich(self, value: Any, where: str) -> str | None:
        """Send the rich forms of a value; its text, or None when a picture says it all."""
        if _is_figure(value):
            self._send_figure(value)
            _forget_figure(value)
            return None
        if type(value) not in PLAIN:
            self._send_forms(value, where)
        text = repr(value)
        if len(text) > MAX_RESULT_CHARS:
            text = f"{text[: MAX_RESULT_CHARS // 2]}\n[...]\n{text[-MAX_RESULT_CHARS // 2 :]}"
        return text

    def _send_forms(self, value: Any, where: str) -> None:
        frame = _as_frame(value)
        if frame is not None:
            self._send(TABLE, _table(frame).encode(), where)
        else:
            for mime, data in _bundle(value):
                self._send(mime, data, where)

    def flush_figures(self) -> None:
        """Show every open figure, in the order in which they were made, and close it."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in list(pyplot.get_fignums()):
            figure = pyplot.figure(number)
            if figure.axes or figure.texts:
                self._send_figure(figure)
            pyplot.close(figure)

    def drop_figures(self) -> None:
        """After a failed cell: half-drawn figures must not turn up in the next one."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        try:
            if pyplot is not None:
                pyplot.close("all")
        except Exception:
            return

    def _send_figure(self, figure: Any) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight")
        self._send("image/png", buffer.getvalue(), "display")


def _is_figure(value: Any) -> bool:
    return type(value).__name__ == "Figure" and type(value).__module__.startswith("matplotlib.")


def _forget_figure(figure: Any) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


def _as_frame(value: Any) -> Any:
    """The DataFrame to show for a value; None when it is no table."""
    if type(value).__module__.partition(".")[0] != "pandas":
        return None
    pandas: Any = sys.modules["pandas"]
    if isinstance(value, pandas.DataFrame):
        return value
    if isinstance(value, pandas.Series):
        return value.to_frame(name="value" if value.name is None else value.name)
    return None


def _table(frame: Any) -> str:
    """{"columns", "index", "data", "total_rows"} with at most 200 rows."""
    shown = frame.head(MAX_TABLE_ROWS)
    table = json.loads(shown.to_json(orient="split", date_format="iso", default_handler=str))
    table["total_rows"] = len(frame)
    return json.dumps(table)


def _bundle(value: Any) -> list[tuple[str, bytes]]:
    """The rich forms that a value's class offers. Looked up on the class: an object that answers to any name has none."""
    kind = type(value)
    found: dict[str, Any] = {}
    mimebundle = getattr(kind, "_repr_mimebundle_", None)
    if callable(mimebundle) and not isinstance(value, type):
        bundle = mimebundle(value)
        if isinstance(bundle, tuple):
            bundle = bundle[0]
        if isinstance(bundle, dict):
            found |= {mime: data for mime, data in bundle.items() if isinstance(mime, str) and mime != "text/plain"}
    for name, mime in METHODS:
        method = getattr(kind, name, None)
        if mime not in found and callable(method) and not isinstance(value, type):
            data = method(value)
            found[mime] = data[0] if isinstance(data, tuple) else data
    return [(mime, raw) for mime, data in found.items() if (raw := _raw(mime, data)) is not None]


def _raw(mime: str, data: Any) -> bytes | None:
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    if isinstance(data, str):
        if mime in ("image/png", "image/jpeg"):  # mime bundles carry pictures as base64
            import base64  # noqa: PLC0415

            return base64.b64decode(data)
        return data.encode("utf-8", "backslashreplace")
    if data is not None and mime.endswith("json"):
        return json.dumps(data, default=str).encode()
    return None
