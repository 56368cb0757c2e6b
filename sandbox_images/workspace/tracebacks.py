"""An exception as text: the user's frames alone, causes kept, bounded in length."""

from __future__ import annotations

import traceback

from sandbox_images.base.annotations import Any

MAX_TEXT, MAX_FRAMES = 12_000, 40
CELL = "<cell "


def describe(problem: BaseException, own_folder: str) -> dict[str, Any]:
    """{"type", "message", "line", "traceback"}; `line` is of the cell, None when no cell is in the trace."""
    name = type(problem).__name__
    try:
        shown = traceback.TracebackException(type(problem), problem, problem.__traceback__, compact=True)
        line = _line(shown, problem)
        _trim(shown, own_folder, set())
        text = "".join(shown.format()).rstrip("\n")
        message = str(problem)
    except BaseException:  # a broken __str__, no memory, or a traceback module that user code has changed
        line, message = None, "the exception could not be described"
        text = f"{name}: {message}"
    return {"type": name, "message": _bounded(message, 2000), "line": line, "traceback": _bounded(text, MAX_TEXT)}


def _line(shown: traceback.TracebackException, problem: BaseException) -> int | None:
    """The last line of a cell that the exception passed through, or that could not be compiled."""
    if isinstance(problem, SyntaxError) and (problem.filename or "").startswith(CELL):
        return problem.lineno
    for frame in reversed(shown.stack):
        if frame.filename.startswith(CELL):
            return frame.lineno
    return None


def _trim(shown: traceback.TracebackException, own_folder: str, seen: set[int]) -> None:
    """Drop what stands above the user's code, and our frames below it, in the whole chain."""
    if id(shown) in seen:
        return
    seen.add(id(shown))
    frames = list(shown.stack)
    first = next((at for at, frame in enumerate(frames) if frame.filename.startswith(CELL)), 0)
    frames = [frame for frame in frames[first:] if not frame.filename.startswith(own_folder)]
    if len(frames) > MAX_FRAMES and not _repeats(frames):
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    shown.stack[:] = frames
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if other is not None:
            _trim(other, own_folder, seen)


def _repeats(frames: list[traceback.FrameSummary]) -> bool:
    """A plain recursion is shortened by the traceback module itself."""
    return len({(frame.filename, frame.lineno) for frame in frames}) <= MAX_FRAMES // 2


def _bounded(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
