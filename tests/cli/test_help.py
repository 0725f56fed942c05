"""What a newcomer reads: every verb has a place and a line, and text flows at any width."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from tests.support.command import run
from tqtool.cli.app import OTHER_PANEL, PANELS, build_app

COMMANDS = get_command(build_app()).commands


def test_every_verb_of_a_panel_exists():
    named = [verb for names in PANELS.values() for verb in names]
    assert len(named) == len(set(named))
    assert set(named) < set(COMMANDS)
    assert {command.rich_help_panel for command in COMMANDS.values()} == {*PANELS, OTHER_PANEL}


def all_commands():
    for command in COMMANDS.values():
        yield command
        yield from getattr(command, "commands", {}).values()


@pytest.mark.parametrize("command", [*all_commands()], ids=lambda command: command.name)
def test_help_flows_and_names_its_arguments(command):
    assert command.help
    assert not re.search(r"[^\n]\n[^\n]", command.help), "a line break of the source"
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            assert (parameter.metavar or parameter.name).isupper(), parameter.name


def test_replacing_has_two_spellings_everywhere():
    for command in all_commands():
        for parameter in command.params:
            if {"--force", "--overwrite"} & set(parameter.opts):
                assert {"--force", "--overwrite"} <= set(parameter.opts), command.name


def test_missteps_say_the_next_step(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    taken = tmp_path / "taken"
    (taken / "tqtool").mkdir(parents=True)
    (taken / "tqtool" / "manifest.json").write_text("{}")
    (taken / "config.json").write_text("{}")
    said = {
        ("generate", tmp_path / "model.gguf", "-p", "x"): "found a file\nhint: tqtool import-gguf",
        ("import-gguf", tmp_path, tmp_path / "out"): "hint: a model folder needs no import",
        ("run", tmp_path / "none.yaml", tmp_path / "out"): "(No such file or directory)\nhint: expected a recipe",
        ("upload", taken, "mine"): "hint: your own name on the hub is one too",
    }
    for arguments, text in said.items():
        answer = run(capsys, monkeypatch, *arguments)
        assert (answer.code, text in answer.err) == (2, True), answer.err
