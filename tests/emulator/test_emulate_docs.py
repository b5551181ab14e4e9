"""The code of docs/emulate.md runs as written."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "emulate.md"


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    scope: dict[str, object] = {"__name__": "docs_emulate"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "engine='fast'" in capsys.readouterr().out
