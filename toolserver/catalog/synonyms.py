"""Words that people use for what tools are called by another: each group means about the same in descriptions of tools."""

from __future__ import annotations

_GROUPS = (
    "folder directory",
    "picture image photo screenshot",
    "repo repository",
    "delete remove erase drop discard",
    "create make add new open",
    "show list get display view see print",
    "find search query lookup locate discover",
    "change update edit modify rewrite alter",
    "run execute start launch evaluate",
    "stop cancel kill terminate abort end",
    "fetch download retrieve get load",
    "save write store put",
    "read get open contents view",
    "copy duplicate clone",
    "move rename",
    "mail email message inbox",
    "send post submit write",
    "page website web url site link webpage",
    "ticket issue bug task",
    "clock time hour hours timezone",
    "day date calendar event schedule appointment meeting",
    "table spreadsheet sheet rows columns",
    "db database sql table",
    "code source program script",
    "shell command bash terminal",
    "remember memory store note knowledge",
    "recall memory retrieve nodes",
    "compare diff difference changes",
    "history log commits",
    "merge pull request pr",
    "branch branches checkout switch",
    "person user people member contact",
    "chat channel message conversation thread",
    "weather forecast temperature",
    "map place location address geocode directions route",
    "money payment charge invoice price refund",
    "translate translation language",
    "summary summarise summarize summarization",
    "think thinking reasoning thoughts reason",
    "button element click",
    "type fill enter input text",
    "pod container deployment kubernetes",
    "server host machine instance",
    "file document",
    "size info metadata stat details",
    "chart graph plot",
    "convert transform format",
    "stock share ticker quote price",
    "video clip movie",
    "song track music playlist audio",
    "error exception crash problem issue",
    "approve review",
    "upload put push",
    "undo revert reset restore rollback",
)


def _table() -> dict[str, tuple[str, ...]]:
    table: dict[str, dict[str, None]] = {}
    for group in _GROUPS:
        members = group.split()
        for word in members:
            table.setdefault(word, {}).update(dict.fromkeys(other for other in members if other != word))
    return {word: tuple(others) for word, others in table.items()}


SYNONYMS = _table()
