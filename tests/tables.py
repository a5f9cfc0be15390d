"""Pages and tables in Markdown."""

import re
from itertools import pairwise

from markdown_it import MarkdownIt


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as Git hosting sites name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(text: str) -> list[str]:
    tokens = MarkdownIt().parse(text)
    return [title.content for tag, title in pairwise(tokens) if tag.type == "heading_open"]


def section(text: str, title: str) -> str:
    """What is below a heading, up to the next one of its level; below a page's title, up to the first of another."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found is not None, f"there is no heading {title!r}"
    return re.split(rf"^#{{2,{max(2, len(found[1]))}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(text: str) -> list[dict[str, str]]:
    """The rows of all tables in a text, by the names of their columns."""
    found, names = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            names = None
        elif names is None:
            names = cells_of(line)
        elif not re.fullmatch(r"[| -]+", line):
            found.append(dict(zip(names, cells_of(line), strict=True)))
    return found


def by_first(text: str) -> dict[str, dict[str, str]]:
    """The rows of one table by their first cell."""
    return {next(iter(row.values())): row for row in rows(text)}


def number(cell: str) -> float:
    """The first number of a cell."""
    found = re.search(r"[-+]?[\d,]*\d(\.\d+)?", cell)
    assert found is not None, cell
    return float(found[0].replace(",", ""))
