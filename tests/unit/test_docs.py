"""The pages lead where they say: links, anchors, the site's table of contents, the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation away, spaces to hyphens."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{page.relative_to(ROOT)} links to what is not there: {broken}"


def test_every_page_has_its_place() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    decisions = (ROOT / "docs/decisions/README.md").read_text()
    for page in PAGES[1:]:
        path = page.relative_to(ROOT / "docs")
        if path.parts[0] == "decisions" and page.name != "README.md":
            assert f"]({page.name})" in decisions, f"{page.name} is not in docs/decisions/README.md"
        else:
            assert f": {path}\n" in contents, f"{path} is not in mkdocs.yml"
