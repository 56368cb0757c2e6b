"""Regular expressions out of foreign schemas: how long a text may be before matching it could take noticeable time.

Python's engine backtracks, and can't be stopped once it runs. So each pattern is judged before it is used: at every
place where the engine may choose (repeat once more or go on, this branch or that), one character of look-ahead should
decide. Where it does not, the choice multiplies the work. Inside a repetition that is exponential and the pattern is
refused; outside it costs one power of the text's length, and the text is bounded accordingly.

The judgement is conservative: it may refuse a harmless pattern, and says what to change.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

_parser = import_module("re._parser")  # the only way to a pattern's parse tree
_codes = import_module("re._constants")

MAX_PATTERN_CHARS = 1_000
MAX_STEPS = 10_000_000  # of the engine, about 0.1 s to 0.2 s
MAX_DEGREE = 3
MAX_FACTOR = 1_024

_OTHER = 1 << 256  # every character past Latin-1
_ALL = (1 << 257) - 1
_SEVERAL_WAYS = "a repeated part can match the same text in several ways, which takes exponential time"
_REPEATS = (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT)


class UnsafePattern(ValueError):  # noqa: N818 - reads as what it names
    """The pattern can't be used; the message says why."""


def pattern_problem(pattern: str) -> str | None:
    """Why `pattern` can't be used, or None."""
    try:
        text_limit(pattern)
    except UnsafePattern as problem:
        return str(problem)
    return None


@lru_cache(maxsize=1024)
def text_limit(pattern: str) -> int:
    """How many characters a text may have to be matched against `pattern`. Raises UnsafePattern."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise UnsafePattern(f"the pattern is longer than {MAX_PATTERN_CHARS} characters")
    try:
        tree = list(_parser.parse(pattern))
        ignore_case = bool(re.compile(pattern).flags & re.IGNORECASE) or "(?i" in pattern
    except (re.error, OverflowError, RecursionError) as problem:
        raise UnsafePattern(f"it is not a regular expression that can be used here: {problem}") from problem
    judge = _Judge(ignore_case=ignore_case)
    degree = judge.cost(tree, follow=0, repeated=False).degree
    if degree and not _anchored(tree) and not _ends_in_repeat(tree):
        degree += 1  # the search starts anew at each character
    degree = max(degree, 1)
    if degree > MAX_DEGREE or judge.factor > MAX_FACTOR:
        raise UnsafePattern("it has too many places where the same text can be matched in several ways")
    return int((MAX_STEPS // judge.factor) ** (1 / degree))


def _anchored(tree: list[Any]) -> bool:
    return bool(tree) and tree[0][0] is _codes.AT and tree[0][1] in (_codes.AT_BEGINNING, _codes.AT_BEGINNING_STRING)


def _ends_in_repeat(tree: list[Any]) -> bool:
    """Whether the only repetition is the last element, of one character: then nothing can fail after it was begun."""
    code, value = tree[-1]
    if code not in _REPEATS or len(value[2]) != 1 or value[2][0][0] in (*_REPEATS, _codes.SUBPATTERN, _codes.BRANCH):
        return False
    return _Judge(ignore_case=True).cost(tree[:-1], follow=0, repeated=False).degree == 0


class _Cost(NamedTuple):
    """Repetitions in one way through a pattern. open: where to stop is a choice; closed: the next character decides."""

    open: int = 0
    closed: int = 0

    @property
    def degree(self) -> int:
        """Each choice is tried with each other one, and each time the closed ones may run over the rest of the text."""
        return self.open + (1 if self.closed else 0)


class _Judge:
    """Walks a parse tree. `factor` collects what choices cost that do not grow with the text."""

    def __init__(self, *, ignore_case: bool) -> None:
        self._ignore_case = ignore_case
        self.factor = 1

    def cost(self, tree: Any, follow: int, *, repeated: bool) -> _Cost:
        """Of matching `tree`, when one of the set `follow` may come after it. Raises UnsafePattern for exponential cost."""
        items = list(tree)
        opened = closed = 0
        for index, item in enumerate(items):
            after, nullable = self.firsts(items[index + 1 :])
            inner = self._cost_of(item, after | (follow if nullable else 0), repeated=repeated)
            opened, closed = opened + inner.open, closed + inner.closed
        return _Cost(opened, closed)

    def _cost_of(self, item: Any, follow: int, *, repeated: bool) -> _Cost:
        code, value = item
        if code in _REPEATS:
            low, high, body = value
            return self._repeat(low, high, body, follow, repeated=repeated)
        if code is _codes.SUBPATTERN:
            return self.cost(value[3], follow, repeated=repeated)
        if code is _codes.ATOMIC_GROUP:
            return self.cost(value, follow, repeated=repeated)
        if code is _codes.BRANCH:
            return self._branch(value[1], follow, repeated=repeated)
        if code in (_codes.ASSERT, _codes.ASSERT_NOT):
            if repeated:
                raise UnsafePattern("it repeats a look-around")
            return self.cost(value[1], 0, repeated=False)
        if code in (_codes.GROUPREF, _codes.GROUPREF_EXISTS):
            raise UnsafePattern("it refers back to a group")
        return _Cost()

    def _repeat(self, low: int, high: int, body: Any, follow: int, *, repeated: bool) -> _Cost:
        first, nullable = self.firsts(body)
        if high == 1:
            ambiguous = bool(first & follow) and low == 0
            if ambiguous and repeated:
                raise UnsafePattern(_SEVERAL_WAYS)
            self.factor *= 2 if ambiguous else 1
            return self.cost(body, follow, repeated=repeated)
        if nullable:
            raise UnsafePattern("it repeats a part that may be empty")
        inner = self.cost(body, first | follow, repeated=True)
        if low == high:
            return inner
        if not first & follow:
            return _Cost(inner.open, 1)
        if repeated:
            raise UnsafePattern(_SEVERAL_WAYS)
        return _Cost(inner.open + 1, inner.closed)

    def _branch(self, branches: list[Any], follow: int, *, repeated: bool) -> _Cost:
        overlap = not _prefix_free(branches) and self._begin_alike(branches, follow)
        if overlap and repeated:
            raise UnsafePattern("a repeated choice has branches that begin alike, which can take exponential time")
        self.factor *= len(branches) if overlap else 1
        costs = [self.cost(branch, follow, repeated=repeated) for branch in branches]
        return _Cost(max(cost.open for cost in costs), max(cost.closed for cost in costs))

    def _begin_alike(self, branches: list[Any], follow: int) -> bool:
        seen = 0
        for branch in branches:
            first, nullable = self.firsts(branch)
            first |= follow if nullable else 0
            if seen & first:
                return True
            seen |= first
        return False

    def firsts(self, tree: Any) -> tuple[int, bool]:
        """The set of characters that can come first in a match of `tree`, and whether it can match nothing."""
        union = 0
        for item in tree:
            first, nullable = self._first(item)
            union |= first
            if not nullable:
                return union, False
        return union, True

    def _first(self, item: Any) -> tuple[int, bool]:
        code, value = item
        if code in _REPEATS:
            first, nullable = self.firsts(value[2])
            return first, nullable or value[0] == 0
        if code is _codes.SUBPATTERN:
            return self.firsts(value[3])
        if code is _codes.ATOMIC_GROUP:
            return self.firsts(value)
        if code is _codes.BRANCH:
            parts = [self.firsts(branch) for branch in value[1]]
            return _union(first for first, _ in parts), any(nullable for _, nullable in parts)
        if code in (_codes.AT, _codes.ASSERT, _codes.ASSERT_NOT):
            return 0, True
        return (_ALL if self._ignore_case else _character_set(code, value)), False


def _prefix_free(branches: list[Any]) -> bool:
    """Whether all branches are plain words of which none begins with another: at most one of them can match."""
    if any(code is not _codes.LITERAL for branch in branches for code, _ in branch):
        return False
    words = sorted([value for _, value in branch] for branch in branches)
    return all(longer[: len(word)] != word for word, longer in pairwise(words))


def _union(sets: Any) -> int:
    union = 0
    for one in sets:
        union |= one
    return union


def _bit(code_point: int) -> int:
    return 1 << code_point if code_point < 256 else _OTHER


def _character_set(code: Any, value: Any) -> int:
    if code is _codes.LITERAL:
        return _bit(value)
    if code is _codes.NOT_LITERAL:
        return _ALL & ~(_bit(value) & ~_OTHER)
    if code is _codes.IN:
        return _class_set(value)
    return _ALL  # any character, and whatever a later Python adds


def _class_set(members: list[Any]) -> int:
    negated = bool(members) and members[0][0] is _codes.NEGATE
    union = 0
    for code, value in members[1:] if negated else members:
        if code is _codes.LITERAL:
            union |= _bit(value)
        elif code is _codes.RANGE:
            low, high = value
            union |= ((1 << (min(high, 255) + 1)) - 1) & ~((1 << low) - 1) if low < 256 else 0
            union |= _OTHER if high > 255 else 0
        else:
            union |= _category_set(str(value))
    return (_ALL & ~union) | _OTHER if negated else union


@lru_cache(maxsize=32)
def _category_set(name: str) -> int:
    """The set of a class such as digits or their complement, found by asking the engine."""
    letter = {"CATEGORY_DIGIT": "d", "CATEGORY_SPACE": "s", "CATEGORY_WORD": "w"}.get(name.replace("NOT_", ""))
    if letter is None:
        return _ALL
    matcher = re.compile("\\" + (letter.upper() if "NOT_" in name else letter))
    return _union(_bit(point) for point in range(256) if matcher.match(chr(point))) | _OTHER
