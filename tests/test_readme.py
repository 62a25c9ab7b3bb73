"""README and CI say the same commands, and what the README names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_two_commands_come_first_and_ci_runs_the_readmes_own_lines():
    campaign, tests = COMMANDS[0].splitlines()
    assert "pyflyte run workflows/campaign.py campaign --config configs/campaigns/laptop.yaml" in campaign
    assert tests.endswith("pytest")
    script = (ROOT / ".ci/run").read_text()
    assert 'eval "${readme[0]}"' in script and 'eval "${readme[1]}"' in script and "README.md" in script


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(target):
    assert any(
        (base / target).exists()
        for base in (ROOT, ROOT / "tasks/rl", ROOT / "tasks/policy", ROOT / "tasks/environments")
    )


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(?:tests/)?(test_\w+\.py)", README))))
def test_every_test_file_the_readme_names_exists(name):
    assert (ROOT / "tests" / name).exists()


def test_no_placeholder_is_left():
    assert not re.search(r"FIGURES|TODO|XXX", README)
