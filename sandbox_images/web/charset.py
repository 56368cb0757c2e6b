"""Bytes of a web page to text. What the page says about itself is tried first, in the order of who is likely to be right.

Order: byte order mark, HTTP header, the document's own declaration (meta element or XML declaration), UTF-8 if it fits,
then a guess by which letters would come out. Declared names mean what browsers take them for: `iso-8859-1` is
windows-1252, `shift_jis` Microsoft's variant, and so on.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"""<meta[^>]{0,1024}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
_XML = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_.:-]{1,40})["']""")
_HEAD_BYTES = 8_192
_AS_BROWSERS_DO = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "cp1252": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "shift_jis": "cp932", "euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "utf-16": "utf-16-le",
}  # fmt: skip
_ALIASES = {
    "x-sjis": "cp932",
    "windows-31j": "cp932",
    "ks_c_5601-1987": "cp949",
    "x-gbk": "gb18030",
    "x-euc-jp": "euc_jp",
    "unicode": "utf-16-le",
}
_GUESSES = ("cp932", "euc_jp", "cp949", "gb18030", "big5hkscs", "cp1251", "koi8-r")
_SAMPLE_BYTES = 65_536


def decode(body: bytes, header_charset: str | None) -> tuple[str, str]:
    """The text and the codec that gave it. Never fails: at worst some characters are replaced."""
    for bom, name in _BOMS:
        if body.startswith(bom):
            return _lenient(body[len(bom) :], name), name
    declared = list(_declared(body, header_charset))
    for name in (*declared, "utf-8"):
        text = _strict(body, name)
        if text is not None:
            return text, name
    name = declared[0] if declared else _guess(body[:_SAMPLE_BYTES])
    return _lenient(body, name), name


def _declared(body: bytes, header_charset: str | None) -> Iterator[str]:
    head = body[:_HEAD_BYTES]
    in_document = _META.search(head) or _XML.search(head)
    for label in (header_charset, in_document.group(1).decode("ascii") if in_document else None):
        name = _codec(label) if label else None
        if name is not None:
            in_ascii = label is not header_charset and name.startswith("utf-16")  # it was read as ASCII, so it can't be
            yield "utf-8" if in_ascii else name


def _codec(label: str) -> str | None:
    label = label.strip().lower()
    try:
        info = codecs.lookup(_ALIASES.get(label, label))
    except (LookupError, ValueError):
        return None
    if not info._is_text_encoding:  # noqa: SLF001 - nothing public tells rot13 and zip from text codecs
        return None
    return _AS_BROWSERS_DO.get(info.name, info.name)


def _strict(body: bytes, name: str) -> str | None:
    """None when a byte does not fit. A character that is cut at the very end is left out: bodies may be cut."""
    if name.startswith(("cp125", "cp874")):
        return _single_byte(body, name)
    try:
        return codecs.getincrementaldecoder(name)("strict").decode(body, final=False)
    except (UnicodeError, ValueError):
        return None


def _single_byte(body: bytes, name: str) -> str:
    """Bytes that a Windows code page leaves undefined stand for the control characters, as in browsers."""
    try:
        return body.decode(name)
    except UnicodeDecodeError:
        table = "".join(bytes([byte]).decode(name, "ignore") or chr(byte) for byte in range(256))
        return body.decode("latin-1").translate(table)


def _lenient(body: bytes, name: str) -> str:
    strict = _strict(body, name)
    return body.decode(name, "replace") if strict is None else strict


def _guess(sample: bytes) -> str:
    if b"\x1b$" in sample and _strict(sample, "iso2022_jp") is not None:
        return "iso2022_jp"
    scored = [(score, name) for name in _GUESSES if (score := _plausible(sample, name)) > 0.6]
    return max(scored)[1] if scored else "cp1252"


def _plausible(sample: bytes, name: str) -> float:
    """How much of what is not ASCII would be letters that texts in this encoding are made of; 0 when it does not fit."""
    text = _strict(sample, name)
    foreign = [char for char in text or "" if char > "\x7f"]
    if len(foreign) < 2:
        return 0.0
    if name in ("cp1251", "koi8-r"):
        together = sum(
            len(run) for run in re.findall(r"[^\x00-\x7f]{3,}", text or "")
        )  # western letters come one by one
        return sum("а" <= char <= "я" for char in foreign) / len(foreign) if together > 0.7 * len(foreign) else 0.0
    if name in ("cp932", "euc_jp"):
        kana = sum("\u3041" <= char <= "\u30fc" for char in foreign)
        common = sum("\u3000" <= char <= "\u30fc" or "\u4e00" <= char <= "\u9fff" for char in foreign)
        return common / len(foreign) if kana >= len(foreign) / 10 else 0.0
    if name == "cp949":
        return sum("가" <= char <= "힣" for char in foreign) / len(foreign)
    return 0.95 * _common_chinese(text or "", foreign, "gb2312" if name == "gb18030" else "big5")


def _common_chinese(text: str, foreign: list[str], narrow: str) -> float:
    """The older, narrower set of an encoding lists the common characters first."""
    first, last = (0xB0, 0xD7) if narrow == "gb2312" else (0xA4, 0xC6)
    hits = sum(len(code := char.encode(narrow, "ignore")) == 2 and first <= code[0] <= last for char in foreign)
    punctuation = sum("\u3000" <= char <= "\u303f" or "\uff00" <= char <= "\uffef" for char in foreign)
    return (hits + punctuation) / len(foreign) if text else 0.0
