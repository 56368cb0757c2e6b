"""Finds tools by words, for a model that looks for one: BM25 over names, descriptions and arguments, by SQLite's FTS5.

Why so: docs/decisions/tool-search.md.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterable

from toolserver.catalog.image import Tool
from toolserver.catalog.synonyms import SYNONYMS

MAX_QUERY_CHARS = 1_000
MAX_QUERY_WORDS = 40
MAX_RESULTS = 100
# BM25's weights of the columns: name, description, names of arguments, descriptions of arguments, image
WEIGHTS = "6.0, 3.0, 1.0, 0.4, 2.0"
WEIGHT_OF_SYNONYMS = 0.35
MAX_INDEXED_CHARS = 4_000  # of one description

_WORD = re.compile(r"[^\W_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_EMPTY_WORDS = frozenset(
    ("a", "about", "all", "am", "an", "and", "any", "are", "as", "at", "be", "but", "by", "can", "could", "do", "does", "for", "from", "have",
     "how", "i", "if", "in", "into", "is", "it", "its", "just", "like", "me", "my", "need", "of", "on", "one", "or", "our", "out", "please",
     "should", "so", "some", "that", "the", "them", "then", "there", "these", "they", "this", "those", "to", "tool", "up", "us", "use", "want",
     "was", "we", "were", "what", "when", "where", "which", "who", "will", "with", "would", "you", "your")
)  # fmt: skip


class ToolIndex:
    """Made anew when the tools are others than the last time. Not for several threads at a time."""

    def __init__(self) -> None:
        self._tools: list[Tool] = []
        self._database: sqlite3.Connection | None = None

    def rank(self, tools: Iterable[Tool], query: str, k: int, images: Collection[str] | None = None) -> list[Tool]:
        """At most `k` tools (of these images; None: of all) that share words with `query`, best first. Takes any text; k is bounded
        to MAX_RESULTS.
        """
        wanted = words(query[:MAX_QUERY_CHARS])[:MAX_QUERY_WORDS]
        database = self._of(list(tools))
        scores: dict[int, float] = {}
        for terms, weight in ((wanted, 1.0), (_related(wanted), WEIGHT_OF_SYNONYMS)):
            for row, score in _matches(database, terms):
                scores[row] = scores.get(row, 0.0) + weight * score
        best = sorted(scores, key=lambda row: (-scores[row], self._tools[row].name))
        found = [self._tools[row] for row in best if images is None or self._tools[row].image in images]
        return found[: max(0, min(k, MAX_RESULTS))]

    def _of(self, tools: list[Tool]) -> sqlite3.Connection:
        if (
            self._database is None
            or len(tools) != len(self._tools)
            or any(one is not other for one, other in zip(tools, self._tools, strict=True))
        ):
            if self._database is not None:
                self._database.close()
            self._tools, self._database = tools, _index(tools)
        return self._database

    def __del__(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def words(text: str) -> list[str]:
    """The words of a text in small letters, each once, without those that say nothing; `camelCase` and `snake_case` taken apart."""
    found = (word.lower() for word in _WORD.findall(_HUMP.sub(" ", text)))
    return list(dict.fromkeys(word for word in found if word not in _EMPTY_WORDS))


def _apart(text: str) -> str:
    return " ".join(_WORD.findall(_HUMP.sub(" ", text)))


def _index(tools: list[Tool]) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute(
        "CREATE VIRTUAL TABLE tools USING fts5(name, description, arguments, about, image, tokenize='porter unicode61')"
    )
    rows = []
    for number, tool in enumerate(tools):
        properties = tool.input_schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        about = [
            part["description"]
            for part in properties.values()
            if isinstance(part, dict) and isinstance(part.get("description"), str)
        ]
        title = str(tool.annotations.get("title", ""))
        rows.append(
            (
                number,
                _apart(f"{tool.own_name} {title}"),
                _apart(tool.description[:MAX_INDEXED_CHARS]),
                _apart(" ".join(map(str, properties))),
                _apart(" ".join(about)[:MAX_INDEXED_CHARS]),
                _apart(tool.image),
            )
        )
    database.executemany(
        "INSERT INTO tools(rowid, name, description, arguments, about, image) VALUES (?, ?, ?, ?, ?, ?)", rows
    )
    return database


def _matches(database: sqlite3.Connection, terms: list[str]) -> list[tuple[int, float]]:
    """Row and score of those that have any of the terms; more is better."""
    if not terms:
        return []
    asked = " OR ".join(f'"{term}"' for term in terms)  # words of letters and digits alone: no syntax of FTS5
    found = database.execute(f"SELECT rowid, -bm25(tools, {WEIGHTS}) FROM tools WHERE tools MATCH ?", (asked,))  # noqa: S608 - constants
    return [(int(row), float(score)) for row, score in found]


def _related(wanted: list[str]) -> list[str]:
    related = dict.fromkeys(other for word in wanted for other in SYNONYMS.get(word, SYNONYMS.get(_stem(word), ())))
    return [word for word in related if word not in wanted]


def _stem(word: str) -> str:
    """Cuts the commonest English endings, to find a word in the table of synonyms."""
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            return stem[:-1] if ending in ("ing", "ed") and stem[-1] == stem[-2] else stem
    return word
