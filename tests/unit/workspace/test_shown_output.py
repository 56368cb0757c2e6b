"""What python_execute shows beside plain text, and how much of it."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.unit.workspace.worker_process import WorkerProcess

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_rich_values_come_as_blocks(worker: WorkerProcess) -> None:
    html = worker.python("class H:\n    def _repr_html_(self):\n        return '<b>bold</b>'\nH()")
    assert [b["resource"]["text"] for b in html.content if b["type"] == "resource"] == ["<b>bold</b>"]
    png = worker.python(
        f"import base64\nclass P:\n    def _repr_png_(self):\n        return base64.b64decode('{PIXEL}')\ndisplay(P())\n'after'"
    )
    assert [b["data"] for b in png.content if b["type"] == "image"] == [PIXEL]
    assert png.structured["result"] == "'after'"
    broken = worker.python("class B:\n    def __repr__(self):\n        raise RuntimeError('repr broke')\nB()")
    assert broken.end == "failed"
    assert "repr broke" in broken.text


def test_large_pictures_become_artifacts(worker: WorkerProcess, tmp_path: Path) -> None:
    outcome = worker.python("class P:\n    def _repr_png_(self):\n        return b'\\x89PNG' + bytes(2_000_000)\nP()")
    (artifact,) = outcome.meta["artifacts"]
    assert (artifact["bytes"], artifact["media_type"]) == (2_000_004, "image/png")
    assert (tmp_path / artifact["path"]).read_bytes().startswith(b"\x89PNG")


def test_figures_and_tables(worker: WorkerProcess) -> None:
    plot = worker.python(
        "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()\nplt.plot([1, 2])\nplt.title('left open');"
    )
    images = [base64.b64decode(b["data"]) for b in plot.content if b["type"] == "image"]
    assert len(images) == 2
    assert all(image.startswith(b"\x89PNG\r\n") for image in images)
    assert worker.python("plt.get_fignums()").structured["result"] == "[]"
    table = worker.python("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', None]})", deadline_s=60)
    assert table.structured["tables"] == [
        {"columns": ["a", "b"], "index": [0, 1], "data": [[1, "x"], [2, None]], "total_rows": 2}
    ]
    assert "a" in table.structured["result"]


def test_a_long_output_keeps_head_and_tail_and_is_an_artifact(worker: WorkerProcess, tmp_path: Path) -> None:
    outcome = worker.python("print('HEAD')\nprint('h' * 5_000_000)\nprint('TAIL')")
    truncated = outcome.meta["truncated"]
    assert truncated["bytes_total"] == 5_000_011
    assert 60_000 < truncated["bytes_kept"] <= 65_536
    assert outcome.stdout.startswith("HEAD")
    assert outcome.stdout.endswith("TAIL\n")
    assert "left out" in outcome.stdout
    assert (tmp_path / truncated["artifact"]).read_bytes() == b"HEAD\n" + b"h" * 5_000_000 + b"\nTAIL\n"
    assert worker.python("for i in range(2000):\n    print('short', i)").meta["truncated"] is None


def test_a_long_result_is_cut_too(worker: WorkerProcess) -> None:
    outcome = worker.python("'r' * 200_000", max_text_bytes=2048)
    assert outcome.meta["truncated"]["bytes_total"] == 200_002
    assert len(outcome.text) < 3000
