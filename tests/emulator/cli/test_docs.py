"""The pages of docs/emulate do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emulate.findings import IDS

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "emulate"


def blocks(page, language):
    text = (PAGES / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [body for name, body in found if name == language]


def emulate(folder, *args):
    return subprocess.run(
        [sys.executable, "-m", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_reduction_is_found_in_one_command(tmp_path):
    source = blocks("guide.md", "python")[0]
    (tmp_path / "reduction.py").write_text(source)
    page = blocks("guide.md", "")[0]
    command, _, shown = page.partition("\n")
    assert command == "$ python -m emulate check reduction.py::case"
    done = emulate(tmp_path, *command.split()[3:])
    assert done.returncode == 1

    def stable(text):  # but for the time and the hash, which depends on Python's minor version
        return re.sub(r"\d+\.\d s$|@[0-9a-f]{8}", "", text.strip(), flags=re.M)

    assert stable(done.stdout) == stable(shown)
    wrong = source.splitlines().index("            part[t] += part[t + step]") + 1
    assert f"reduction.py:{wrong} in block_sum" in shown


def test_reduction_with_the_barrier_is_clean(tmp_path):
    source = blocks("guide.md", "python")[0]
    line = "            part[t] += part[t + step]\n"
    assert line in source
    (tmp_path / "reduction.py").write_text(
        source.replace(line, line + "        cuda.syncthreads()\n")
    )
    done = emulate(tmp_path, "emulate", "check", "reduction.py::case", "--seeds", "1")
    assert done.returncode == 0, done.stdout


def test_pytest_example(tmp_path):
    source, test = blocks("guide.md", "python")[:2]
    line = "            part[t] += part[t + step]\n"
    source = source.replace(line, line + "        cuda.syncthreads()\n")
    test = test.replace("seeds=20", "seeds=2")
    (tmp_path / "test_reduction.py").write_text(source + test)
    command = blocks("guide.md", "")[1].split()
    done = emulate(tmp_path, *command, "-p", "no:cacheprovider", "--strict-markers")
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("page", ["schedules.md", "trace.md"])
def test_examples_run(page):
    scope = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), scope)


def test_every_finding_has_its_line():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (PAGES / "findings.md").read_text(), re.M)
    assert dict(rows) == IDS


def test_links():
    for page in ("guide.md", "findings.md", "schedules.md", "trace.md"):
        for link in re.findall(r"\]\((\w+\.md)\)", (PAGES / page).read_text()):
            assert (PAGES / link).is_file() or link in ("planted.md", "mutation.md"), (page, link)
