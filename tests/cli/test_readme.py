"""What the documents say is so: the example runs, commands exist, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from nbmoe.cli import main

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{n}.md" for n in ("index", "operations", "formats", "checkpoints", "cli")),
]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_example_runs_as_pasted(root):
    (example,) = blocks((root / "README.md").read_text(encoding="utf-8"), "python")
    assert len([line for line in example.splitlines() if line]) <= 15
    assert "token 0 goes to experts" in run_example(root, example)


def test_examples_of_operations_and_layers_run_as_pasted(root):
    text = (root / "docs" / "operations.md").read_text(encoding="utf-8")
    prepared, ffn, layer = blocks(text, "python")
    assert run_example(root, prepared) == run_example(root, ffn) == ""
    assert run_example(root, layer).endswith("(5, 128)\n")


def run_example(root, example):
    environment = {k: v for k, v in os.environ.items() if k != "NBMOE_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_command_of_the_readme(root, tmp_path, monkeypatch, capsys):
    text = (root / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("python -m nbmoe run"))
    arguments = shlex.split(line)[3:]
    arguments[1] = str(root / arguments[1])
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--backend", "reference"]) == 0
    assert (tmp_path / "y.npy").is_file()
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(root, page):
    path = root / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", ["checkpoints", "cli"])
def test_commands_run_as_pasted(root, page, monkeypatch, capsys):
    monkeypatch.chdir(root)
    text = (root / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(line)
        for block in blocks(text, "bash")
        for line in block.splitlines()
        if line.startswith("python -m nbmoe")
    ]
    assert commands
    for command in commands:
        assert main(command[3:]) == 0
    capsys.readouterr()


def test_shown_output_is_printed(root, capsys):
    """The lines about a layer in docs/cli.md are those of the fixture that they name."""
    shown = re.search(
        r"^    layer {7}(?P<name>\w+), .*(\n    .*)+",
        (root / "docs" / "cli.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert shown is not None
    folder = root / "tests" / "fixtures" / shown.group("name")
    assert main(["run", str(folder), "--tokens", "1", "--backend", "reference"]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.group().splitlines():
        assert line.strip() in printed


def test_documented_options_exist(root, capsys):
    usage = ""
    for command in ("run", "demo", "bench", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage += capsys.readouterr().out
    for option in re.findall(
        r"`(--[a-z]+)", (root / "docs" / "cli.md").read_text(encoding="utf-8")
    ):
        assert option in usage
