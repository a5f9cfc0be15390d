"""The documentation site builds without a warning, and links between files of the repository lead somewhere."""

import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sb3_contrib import TRPO
from stable_baselines3 import PPO

from sb3_uatrpo import RECOMMENDED, RECOMMENDED_DISCRETE, UATRPO, MatchedTRPO
from sb3_uatrpo.core import estimates, memory, subspace
from sb3_uatrpo.core.confidence import confidence_radius_squared

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(page for of in ("docs", "benchmarks") for page in (ROOT / of).rglob("*.md"))])


def inline(page: Path) -> Iterator[Token]:
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        yield from token.children or []


def links(page: Path) -> set[str]:
    """What a page links to and the pictures that it shows, but for other sites."""
    targets = {token.attrs.get("href", token.attrs.get("src")) for token in inline(page)} - {None}
    return {str(target) for target in targets if not re.match("https?:", str(target))}


def anchors(page: Path) -> set[str]:
    """Those of headings, as Git hosting sites name them."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    headings = [text.content for tag, text in pairwise(tokens) if tag.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in anchors(target), f"{link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_in_pages_has_no_syntax_error(page):
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence" and token.info == "python":
            compile(token.content, str(page), "exec")
        elif token.type == "fence" and token.info == "bash":
            subprocess.run(["bash", "-n"], input=token.content, text=True, check=True)


def test_the_studies_of_the_docs_are_there():
    """A study has its runs' table."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
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

    front = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    # a page, an anchor of another page, a picture, and a file of the repository
    for found in (
        'href="results.html"',
        'href="rl_zoo.html#hook"',
        "_images/recommended.png",
        "_images/agents.gif",
    ):
        assert found in front
    assert re.search(r'href="_downloads/\w+/shortest.py"', front)
    # no page of a Markdown file is left out, and none links to a Markdown file
    # model cards are for who reads the repository
    for page in {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "agents").rglob("*.md")}:
        html = tmp_path / "html" / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert not re.search(r'href="(?!https?:)[^"]*\.md["#]', html.read_text(encoding="utf-8"))


def test_git_does_not_show_what_commands_leave(tmp_path):
    """In the clone, where README, docs and examples have their commands run."""
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    left = (
        "uatrpo_cheetah.zip", "uatrpo_cheetah.pkl", "logs/uatrpo/Hopper-v4_1/Hopper-v4.zip", "runs/speed/speed.json",
        "MUJOCO_LOG.TXT", "examples/MUJOCO_LOG.TXT", "uncertainty.png", "agents.gif", "hopper.onnx",
        "best/best_model.zip",
        "checkpoints/rl_model_100_steps.zip", "docs/agents/uatrpo/Hopper-v4_1/policy.onnx", "agents/README.md",
        "docs/agents/uatrpo/Hopper-v4_1/videos/video.mp4", "enjoy.py", "benchmark.md", ".venv/.training",
    )  # fmt: skip
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    command = ["git", "check-ignore", *left, "docs/agents/uatrpo/Hopper-v4_1/README.md", "docs/img/agents.gif"]
    said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said.splitlines() == list(left)


def test_the_table_of_defaults_is_that_of_the_signatures():
    """What "Coming from TRPO or PPO" says of each argument, and that it leaves out none whose default differs."""
    classes = (UATRPO, MatchedTRPO, TRPO, PPO)
    defaults = [{k: v.default for k, v in inspect.signature(cls).parameters.items()} for cls in classes]
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    section = page.split("### Which arguments and defaults differ?")[1].split("\n### ")[0]

    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|", section, re.MULTILINE)
    assert len(rows) > 15
    for name, *cells in rows:
        assert cells == [repr(of_class[name]) if name in of_class else "–" for of_class in defaults], name
    alone = dict(re.findall(r"`(\w+)=([^`]+)`", section.split("`UATRPO` alone has")[1]))
    assert len(alone) == 10
    for name, default in alone.items():
        assert eval(default) == defaults[0][name], name
        assert not any(name in of_class for of_class in defaults[1:]), name
    of_ppo = re.findall(r"`(\w+)`", section.split("PPO alone has")[1].split(".")[0])
    assert len(of_ppo) == 6
    for name in of_ppo:
        assert [name in of_class for of_class in defaults] == [False, False, False, True], name
        for cls in classes[:2]:
            # it says what takes its place
            with pytest.raises(TypeError, match=f"'{name}': "):
                cls("MlpPolicy", "CartPole-v1", **{name: 1})
    named = {name for name, *_ in rows} | alone.keys() | set(of_ppo)
    for name in set().union(*defaults) - named:
        assert all(name in of_class and of_class[name] == defaults[0][name] for of_class in defaults), name


def test_the_table_of_presets_is_that_of_the_code():
    page = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    section = page.split("\n## Presets")[1].split("\n## ")[0].split("\n### ")[0]
    paper = {name: of.default for name, of in inspect.signature(UATRPO).parameters.items()}
    rows = re.findall(r"^\| `(\w+)`.*? \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    shown = {name: [cell.strip("`").replace('"', "'") for cell in cells] for name, *cells in rows}
    assert shown.pop("log_std_init") == [
        str(preset.get("policy_kwargs", {}).get("log_std_init", 0))
        for preset in ({}, RECOMMENDED, RECOMMENDED_DISCRETE)
    ]
    assert shown.pop("trust_region_delta") == [repr(paper["trust_region_delta"]), "not used", "not used"]
    for name, cells in shown.items():
        values = [paper[name], *(preset.get(name, paper[name]) for preset in (RECOMMENDED, RECOMMENDED_DISCRETE))]
        assert [cell if cell.startswith("'") else float(cell) if cell != "None" else None for cell in cells] == [
            repr(value) if isinstance(value, str) else value for value in values
        ], name
    changed = {name for preset in (RECOMMENDED, RECOMMENDED_DISCRETE) for name in preset}
    assert changed - {"policy_kwargs"} <= shown.keys()


def test_constants_that_the_docs_name_are_those_of_the_code():
    page = " ".join((ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").split())
    exact_below = math.ceil(subspace.CUT_FOR_GRAM / subspace.RESOLUTION)
    for phrase in (
        f"in parts of {estimates.GRAPH_BYTES // 2**20} MiB",
        f"{estimates.COLUMN_BYTES // 2**20} MiB of temporaries at a time",
        f"blocks of {subspace.ROWS_AT_ONCE} rows, {2 * 8 * subspace.ROWS_AT_ONCE // 2**10} KiB·m",
        f"all of these are {memory.GPU_FACTOR} times as large",
        f"With {exact_below} parameters or more, singular",
        f"With 200 directions, R_n² is {confidence_radius_squared(200, 256, 0.05):.1f}.",
    ):
        assert phrase in page, phrase
