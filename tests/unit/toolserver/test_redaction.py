from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from toolserver.sandbox.command_run import Redaction


@given(st.text("abx", max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_a_secret_is_taken_out_however_the_stream_is_cut(around: str, cuts: list[int]) -> None:
    secret = "abababab"
    data = f"{around}{secret}{around}".encode()
    redaction = Redaction([secret, "short"])
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    passed = b"".join(redaction.feed(data[a:b]) for a, b in itertools.pairwise(places)) + redaction.rest()
    assert secret.encode() not in passed
    assert passed == data.replace(secret.encode(), "[…]".encode())


def test_without_secrets_nothing_waits() -> None:
    assert Redaction([]).feed(b"data") == b"data"
    assert Redaction(["a-long-secret"]).feed(b"data a-lo") == b"data "
