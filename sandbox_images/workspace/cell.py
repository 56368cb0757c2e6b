"""Running one cell: compile, execute in the namespace of __main__, show the last expression, tell what went wrong."""

from __future__ import annotations
import __future__

import _ast
import errno
import linecache
import sys
import types

from sandbox_images.base.annotations import Any
from sandbox_images.workspace.display import Displays
from sandbox_images.workspace.tracebacks import describe

TOP_LEVEL_AWAIT, ONLY_AST, COROUTINE = 0x2000, 0x400, 0x80  # ast.PyCF_*, inspect.CO_COROUTINE: those modules are large
FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag
REMEMBERED_SOURCES = 500
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOOP_RUNS = "cannot be called from a running event loop"


class CellRunner:
    """`namespace` is the dict of __main__; `own_folder` holds the files whose frames no traceback shows."""

    def __init__(self, namespace: dict[str, Any], own_folder: str) -> None:
        self._namespace, self._own_folder = namespace, own_folder
        self._flags = 0  # `from __future__ import` stays in force
        self._sources: list[str] = []
        self._async_runner: Any = None
        self._compile, self._eval = compile, eval

    def run(self, code: str, number: int, displays: Displays) -> dict[str, Any]:
        """The fields of a `done` frame. KeyboardInterrupt passes when it came between the user's code and ours."""
        name = f"<cell {number}>"
        self._remember(name, code)
        self._forget_listings()
        try:
            value = self._execute(name, code)
            displays.flush_figures()
            result = None if value is None else displays.result(value)
        except BaseException as problem:
            return self._failure(problem, displays)
        return {"status": "ok", "result": result}

    def _execute(self, name: str, code: str) -> Any:
        flags = TOP_LEVEL_AWAIT | self._flags
        tree = self._compile(code, name, "exec", flags | ONLY_AST, dont_inherit=True)
        last = None
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Expression(tree.body.pop().value)
        body = None
        if tree.body or last is None:
            body = self._compile(tree, name, "exec", flags, dont_inherit=True)
            self._flags |= body.co_flags & FUTURE_FLAGS
        final = None if last is None else self._compile(last, name, "eval", flags, dont_inherit=True)
        if ((body.co_flags if body else 0) | (final.co_flags if final else 0)) & COROUTINE:
            return self._run_async(body, final)
        if body:
            self._eval(body, self._namespace)
        return self._eval(final, self._namespace) if final else None

    def _run_async(self, body: types.CodeType | None, final: types.CodeType | None) -> Any:
        """Top-level await: in one event loop that lives as long as the interpreter, but never runs between cells."""
        import asyncio  # noqa: PLC0415 - three megabytes that most sessions never need

        async def run() -> Any:
            if body is not None:
                value = self._eval(body, self._namespace)
                if body.co_flags & COROUTINE:
                    await value
            if final is None:
                return None
            value = self._eval(final, self._namespace)
            return await value if final.co_flags & COROUTINE else value

        if self._async_runner is None:
            self._async_runner = asyncio.Runner()
        return self._async_runner.run(run())

    def _failure(self, problem: BaseException, displays: Displays) -> dict[str, Any]:
        if isinstance(problem, SystemExit):
            code = problem.code
            if code is not None and not isinstance(code, int):
                sys.stderr.write(f"{code}\n")  # as Python itself does with sys.exit("text")
                code = 1
            return {"status": "exit", "code": code or 0}
        if isinstance(problem, Exception):
            displays.drop_figures()
        error = describe(problem, self._own_folder)
        if isinstance(problem, RuntimeError) and LOOP_RUNS in str(problem):
            error["traceback"] += (
                "\nThis cell uses top-level await, so a loop runs already: write `await main()` instead of asyncio.run(main())."
            )
        number = problem.errno if isinstance(problem, OSError) else None
        return {
            "status": "error",
            "error": error,
            "disk_full": number in DISK_ERRORS,
            "file_too_large": number == errno.EFBIG,
        }

    def _remember(self, name: str, code: str) -> None:
        """So that tracebacks and inspect find the source lines."""
        linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        self._sources.append(name)
        if len(self._sources) > REMEMBERED_SOURCES:
            linecache.cache.pop(self._sources.pop(0), None)

    def _forget_listings(self) -> None:
        """A module written a moment ago must be found: folder listings are cached by a time stamp that may be as old."""
        for path in sys.path[-2:]:
            finder = sys.path_importer_cache.get(path)
            if finder is not None and hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()
