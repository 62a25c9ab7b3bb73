"""README and CI say the same commands, and what the READMEs name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PAGES = [
    path for folder in ("tasks", "kernels", "configs") for path in sorted((ROOT / folder).rglob("*README.md"))
]
LINKS = [
    pytest.param(page, target, id=f"{page.relative_to(ROOT)}: {target}")
    for page in [ROOT / "README.md", *PAGES]
    for target in sorted(set(re.findall(r"\]\((?!http)([^)]+)\)", page.read_text())))
]


def headings(page):
    """As links name them: lower case, no punctuation, words joined."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_two_commands_come_first_and_ci_runs_the_readmes_own_lines():
    campaign, tests = COMMANDS[0].splitlines()
    assert "pyflyte run workflows/campaign.py campaign --config configs/campaigns/laptop.yaml" in campaign
    assert tests.endswith("pytest -n 2")
    script = (ROOT / ".ci/run").read_text()
    assert 'eval "${readme[0]}"' in script and 'eval "${readme[1]}"' in script and "README.md" in script


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page, target):
    path, _, heading = target.partition("#")
    file = page.parent / path if path else page
    assert file.exists()
    assert not heading or heading in headings(file)


def test_the_readme_is_a_path_and_leads_to_every_page_of_detail():
    assert len(README.splitlines()) <= 280
    assert not [page for page in PAGES if str(page.relative_to(ROOT)) not in README]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_file_that_a_page_names_exists_and_no_placeholder_is_left(page):
    named = re.findall(r"`(?:tests/)?((?:test|bench)_\w+\.py)", page.read_text())
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]
    assert not re.search(r"FIGURES|TODO|XXX", page.read_text())
