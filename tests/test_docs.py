"""The documentation site builds without a warning, and links between files of the repository lead somewhere."""

import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sb3_contrib import TRPO
from stable_baselines3 import PPO

from sb3_uatrpo import RECOMMENDED, RECOMMENDED_DISCRETE, UATRPO, MatchedTRPO
from tests.tables import anchor_of, headings, rows, section

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(page for of in ("docs", "benchmarks") for page in (ROOT / of).rglob("*.md"))])


def inline(page: Path) -> Iterator[Token]:
    for token in MarkdownIt().enable("table").parse(page.read_text("utf-8")):
        yield from token.children or []


def links(page: Path) -> set[str]:
    """What a page links to and the pictures that it shows, but for other sites."""
    targets = {token.attrs.get("href", token.attrs.get("src")) for token in inline(page)} - {None}
    return {str(target) for target in targets if not re.match("https?:", str(target))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in map(anchor_of, headings(target.read_text("utf-8"))), f"{link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_in_pages_has_no_syntax_error(page):
    for token in MarkdownIt().parse(page.read_text("utf-8")):
        if token.type == "fence" and token.info == "python":
            compile(token.content, str(page), "exec")
        elif token.type == "fence" and token.info == "bash":
            subprocess.run(["bash", "-n"], input=token.content, text=True, check=True)


def test_the_studies_of_the_docs_are_there():
    """A study has its runs' table."""
    text = "".join(page.read_text("utf-8") for page in PAGES)
    folders = {ROOT / folder for folder in re.findall(r"--folder (benchmarks/results/[\w/]+)", text)}
    studies = {folder for folder in folders if folder.exists() and folder.name != "direction_quality"}
    assert len(studies) > 5
    assert {study for study in studies if not (study / "runs.csv.gz").exists()} == set()


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    result = subprocess.run(
        [*command, "-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

    front = (tmp_path / "html" / "index.html").read_text("utf-8")
    # a page, an anchor of another page, pictures, and a file of the repository
    for found in (
        "results.html",
        "rl_zoo.html#hook",
        "_images/recommended.png",
        r"_downloads/\w+/shortest.py",
    ):
        assert re.search(f'"{found}"', front)
    # every page but the model cards has one, and none links to a Markdown file
    for page in {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "agents").rglob("*.md")}:
        html = tmp_path / "html" / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert not re.search(r'href="(?!https?:)[^"]*\.md["#]', html.read_text("utf-8"))


def test_the_defaults_of_the_page_are_those_of_the_signatures():
    """What "Coming from TRPO or PPO" has of each argument; what it leaves out has the same default everywhere."""
    classes = (UATRPO, MatchedTRPO, TRPO, PPO)
    defaults = [{k: v.default for k, v in inspect.signature(cls).parameters.items()} for cls in classes]
    expected = {name: [repr(of[name]) if name in of else "–" for of in defaults] for name in set().union(*defaults)}
    text = section((ROOT / "docs" / "using.md").read_text("utf-8"), "Which arguments and defaults differ?")
    table = {name.strip("`"): cells for name, *cells in (row.values() for row in rows(text))}
    assert len(table) > 15
    assert table == {name: expected[name] for name in table}
    alone = {name: eval(default) for name, default in re.findall(r"`(\w+)=([^`]+)`", text)}
    assert alone == {
        name: defaults[0][name] for name in defaults[0].keys() - table.keys() if expected[name][1:] == ["–"] * 3
    }
    of_ppo = {name for name, (*others, _) in expected.items() if set(others) == {"–"}}
    for name, cls in itertools.product(of_ppo, classes[:2]):
        assert f"`{name}`" in text
        # it says what takes its place
        with pytest.raises(TypeError, match=f"'{name}': "):
            cls("MlpPolicy", "CartPole-v1", **{name: 1})
    assert {
        name for name in expected.keys() - table.keys() - alone.keys() - of_ppo if len(set(expected[name])) > 1
    } == set()


def test_the_table_of_presets_is_that_of_the_code():
    paper = {name: of.default for name, of in inspect.signature(UATRPO).parameters.items()}
    presets = []
    for preset in ({}, RECOMMENDED, RECOMMENDED_DISCRETE):
        log_std_init = preset.get("policy_kwargs", {}).get("log_std_init", 0)
        unused = {"trust_region_delta": "not used"} if preset else {}
        presets.append({**paper, **preset, **unused, "log_std_init": log_std_init})
    table = rows(section((ROOT / "docs" / "parameters.md").read_text("utf-8"), "Presets").split("\n### ")[0])
    shown = {row["argument"].split("`")[1]: [cell.strip("`") for cell in list(row.values())[1:]] for row in table}
    for name, cells in shown.items():
        assert [cell if cell == "not used" else eval(cell) for cell in cells] == [of[name] for of in presets], name
    assert {*RECOMMENDED, *RECOMMENDED_DISCRETE} - {"policy_kwargs"} <= shown.keys()
