"""The recipe of the image and the compose file: no root, a read-only root, commands that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from fedtmle.cli import app

FOLDER = Path(__file__).parents[2] / "deploy"
RECIPE = (FOLDER / "Containerfile").read_text(encoding="utf-8")
COMPOSE = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
INSTRUCTIONS = [
    (line.split(None, 1)[0], line.split(None, 1)[1])
    for line in RECIPE.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


def of(name: str) -> list[str]:
    return [words for instruction, words in INSTRUCTIONS if instruction == name]


def exists(words: list[str]) -> bool:
    """Whether the command line knows this command and its options."""
    command = [word for word in words if not word.startswith(("/", "-"))]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--help"])
    return shown.exit_code == 0 and all(word in shown.output for word in words if word.startswith("-"))


def test_the_image_has_no_root_and_installs_from_the_checked_bundle_alone() -> None:
    assert of("USER") == ["10001"]
    order = [instruction for instruction, _ in INSTRUCTIONS]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "ADD" not in order
    assert "/bundle/install.sh" in of("RUN")[0]
    assert not any(word in RECIPE for word in ("pip install", "curl", "wget", "latest", "sudo", "chmod 777"))
    assert len({words.split()[0] for words in of("FROM")}) == 1


def test_the_commands_of_the_image_exist() -> None:
    assert json.loads(of("ENTRYPOINT")[0]) == ["fedtmle"]
    assert exists(json.loads(of("CMD")[0]))
    (check,) = re.findall(r"CMD (\[.*\])", of("HEALTHCHECK")[0])
    program, *words = json.loads(check)
    assert program == "fedtmle"
    assert exists(words)
    assert not exists(["deploy", "nothing", "/kit"])  # the check can fail


def test_the_compose_file_takes_rights_away() -> None:
    for line in (
        "read_only: true",
        "cap_drop: [ALL]",
        'security_opt: ["no-new-privileges:true"]',
        'user: "10001:10001"',
    ):
        assert line in COMPOSE
    (command,) = re.findall(r"^    command: (\[.*\])$", COMPOSE, flags=re.MULTILINE)
    assert exists(json.loads(command))
    (check,) = re.findall(r"^      test: (\[.*\])$", COMPOSE, flags=re.MULTILINE)
    assert exists(json.loads(check)[2:])
    assert "privileged" not in COMPOSE.replace("no-new-privileges", "")
