"""Pages: links that lead somewhere, commands with options that exist; and no binaries in the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pictures
import pytest
from options_page import PAGE, page

from p2pkv import config
from p2pkv_proxy.options import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
PICTURES = {"docs/dashboard.png"}


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_configurations_name_options_that_exist(name: str) -> None:
    """In each `kv_connector_extra_config`, and each command line of p2pkv-proxy, that a page shows."""
    text = (ROOT / name).read_text()
    for shown in re.findall(r'"kv_connector_extra_config":\s*\{([^{}]*)\}', text):
        assert set(re.findall(r'"(\w+)":', shown)) <= set(config.EXTRA)
    known = make_parser()._option_string_actions
    for command in re.findall(r"(?m)^p2pkv-proxy((?:.*\\\n)*.*)$", text):
        assert set(re.findall(r"(?<!\S)(--[\w-]+)", command)) <= known.keys()


def test_the_options_page_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run `make pages`"


def test_the_picture_of_a_pair_is_drawn_by_its_script() -> None:
    assert pictures.PAIR.read_text() == pictures.pair(), "run `make pictures`"


def test_operators_read_no_names_of_tests() -> None:
    assert re.findall(r"tests/\S+|\btest_\w+", (ROOT / "docs" / "operations.md").read_text()) == []


def test_no_binary_is_in_the_repository() -> None:
    """Wheels, weights and recordings stay out; a picture of a page is named above."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this tree is not a git repository")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and name not in PICTURES]
    assert len(files) > 100
    binary = [path for path in files if path.is_file() and b"\0" in path.read_bytes()[:65536]]
    large = [path for path in files if path.is_file() and path.stat().st_size > 1 << 20]
    assert binary + large == []
