"""
The figures of the pages, but for their sentences: ``<!--SOURCE-->0.78 and 0.41<!--/-->`` says where figures come from.
The source must have them in the same order, in as many digits or more. Of a table that stands between two such marks,
each row is compared with the source's rows of its name, where there are some, with bold type, stars, daggers and
numbers of runs. A source is a folder or page of ``benchmarks/results``, a hyperparameter file, or ``derived`` below.
``#final`` after it stands for the first heading whose anchor begins like this, ``:damping-1`` for its rows of a name.
"""

import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from judge_small_batches import REFERENCES

from sb3_uatrpo.core import estimates, memory, subspace
from sb3_uatrpo.core.confidence import confidence_radius_squared
from sb3_uatrpo.study import read_study
from tests.tables import anchor_of, by_first, cells_of, headings, number, rows, section

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"(?:< )?(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)[%°]?"
FIGURE = re.compile(
    rf"(\*\*)?({NUMBER})\**(?: ± ({NUMBER}))?((?: \[\d+\]| \\\*| †)*)(?: \(({NUMBER}) to ({NUMBER})\))?"
)
MARKED = re.compile(r"<!--(?!/)(\S+?)-->(.*?)<!--/-->", re.DOTALL)


def is_rounded(shown: str, known: str) -> bool:
    """Whether two numbers are one, in as many digits as the first has, and with the same unit."""
    (unit, digits), of_known = ((re.sub(r"[-+\d.,]", "", x), re.sub(r"[^-\d.]", "", x)) for x in (shown, known))
    return of_known[0] == unit and f"{float(of_known[1]):.{len(digits.partition('.')[2])}f}" == digits


def is_shown(shown: tuple[str, ...], known: tuple[str, ...], with_marks: bool) -> bool:
    """Whether a figure is that of a source. Its interval may be left out, and its standard error with its marks."""
    (bold, value, error, marks, *bounds), (of_bold, of_value, of_error, of_marks, *of_bounds) = shown, known
    alike = (bold, marks) == (of_bold, of_marks) or not with_marks or (of_error and not error)
    pairs = [(value, of_value), (error, of_error), *zip(bounds, of_bounds, strict=True)]
    return bool(alike) and all(not x or (y and is_rounded(x, y)) for x, y in pairs)


def named(name: str, source: str) -> str:
    """The rows of a source that have a name, which is written as an anchor is."""
    lines = (line for line in source.splitlines() if line.startswith("|"))
    return "\n".join(line for line in lines if name and name in map(anchor_of, cells_of(line)))


def lacking(marked: str, source: str) -> list[str]:
    """:return: the lines of a marked text with figures that its source lacks or has in another order"""
    # a table's header and first cells are names
    table = [cells_of(line) for line in marked.strip().splitlines()[2:]] if marked.lstrip().startswith("|") else []
    lines = [(anchor_of(name), " | ".join(cells)) for name, *cells in table] or [("", " ".join(marked.split()))]
    wrong = []
    for name, text in lines:
        shown, known = FIGURE.findall(text), iter(FIGURE.findall(named(name, source) or source))
        # each is looked for after the one before
        if not shown or not all(any(is_shown(x, y, "|" in text) for y in known) for x in shown):
            wrong.append(f"{name} {text}".strip())
    return wrong


SOURCE = """
| environment | UATRPO | PPO | p |
| --- | --- | --- | --- |
| Hopper-v4 | 3,465 ± 40 | **2,183** ± 225 \\* † | 0.0456 |
| Ant-v4 | 3,330 ± 158 [5] | -17 (-20 to 3) | < 0.001 |
"""
TABLE = """
| task | UATRPO and PPO | p |
|---|---|---|
| Hopper-v4 | 3,465 ± 40; **2,183** ± 225 \\* † | 0.046 |
"""


@pytest.mark.parametrize(
    ("marked", "n_wrong"),
    [
        ("3,465 ± 40 beside 3,330, and -17 (-20 to 3)", 0),
        (TABLE, 0),
        ("| 3,465 | 2,183 |", 0),
        ("**0.05**, p < 0.001", 0),
        ("3,330 above 3,465", 1),
        ("3,465 ± 41", 1),
        ("-17 ± 3", 1),
        ("-17 (-20 to 4)", 1),
        ("-20", 1),
        ("17", 1),
        ("346", 1),
        ("0.0457", 1),
        ("0.001", 1),
        ("5%", 1),
        ("none", 1),
        (TABLE.replace("225 \\* †", "225 †"), 1),
        (TABLE.replace("**2,183**", "2,183"), 1),
        (TABLE.replace("Hopper", "Ant"), 1),
        (TABLE + "| Ant-v4 | 3,465 ± 40 | 0.05 |\n", 1),
    ],
)
def test_a_wrong_figure_is_found(marked, n_wrong):
    assert len(lacking(marked, SOURCE)) == n_wrong


PLACES = [f"benchmarks/results/{{}}{of}" for of in ("/judged.md", "/report.md", ".md")]
PLACES += ["sb3_uatrpo/hyperparams/{}.yml", "docs/{}.md"]


@cache
def source_of(name: str) -> str:
    place, heading, row = re.fullmatch(r"([^#:]+)(?:#([^:]+))?(?::(.+))?", name).groups()
    paths = (path for path in (ROOT / of.format(place) for of in PLACES) if path.exists())
    text = derived() if place == "derived" else next(paths).read_text("utf-8")
    if heading:
        text = section(text, next(title for title in headings(text) if anchor_of(title).startswith(heading)))
    found = named(row, text) if row else text
    assert found, f"{name}: there is no such row"
    return found


def finals(report: str) -> dict[tuple[str, str], float]:
    """Mean final returns by task and method."""
    return {(row["task"], row["method"]): number(row["final return"]) for row in rows(source_of(f"{report}#all"))}


def highest_published() -> dict[str, float]:
    """By environment, the highest published return over UATRPO's."""
    ours, *others = rows(source_of("results#published"))
    tasks = list(ours)[1:]
    return {task: max(number(row[task]) for row in others if row[task]) / number(ours[task]) for task in tasks}


@cache
def ratios_with_shrinkage() -> pd.Series:
    study = read_study(RESULTS / "paper")
    runs = study.runs[(study.runs.algo == "uatrpo") & (study.runs.variant == "paper-batches")]
    return study.updates.kl_ratio[study.updates.run.isin(runs.index)]


PAPER, SHRINKAGE, WITHOUT = "uatrpo_paper", "uatrpo (paper-batches)", "uatrpo (paper-batches, uncertainty_coef=0)"


@cache
def derived() -> str:
    """A table of what pages derive from code and reports."""
    noise, earlier = finals("adversarial_noise"), finals("paper/noise")
    published = highest_published()
    table = [
        ("graph MiB", estimates.GRAPH_BYTES / 2**20),
        ("column MiB", estimates.COLUMN_BYTES / 2**20),
        ("rows at once", f"{subspace.ROWS_AT_ONCE} {2 * 8 * subspace.ROWS_AT_ONCE / 2**10}"),
        ("GPU factor", memory.GPU_FACTOR),
        ("exact SVD", math.ceil(subspace.CUT_FOR_GRAM / subspace.RESOLUTION)),
        ("squared radius", confidence_radius_squared(200, 256, 0.05)),
        ("ratios", len(ratios_with_shrinkage())),
        ("published", " ".join(f"{published[task] - 1:.2%}" for task in ("Ant", "Walker2d", "Swimmer"))),
    ]
    for name, method in (("with the paper's", PAPER), ("with shrinkage", SHRINKAGE)):
        leads = (noise[task, method] / noise[task, "trpo_matched"] - 1 for task in ("Walker2d-v4", "Hopper-v4"))
        table.append((f"leads {name}", " ".join(f"{lead:.2%}" for lead in leads)))
    others = ("Hopper-v4", "Swimmer-v4", "Walker2d-v4")
    gains = sorted(earlier[task, WITHOUT] / earlier[task, SHRINKAGE] - 1 for task in others)
    table.append(("gains", f"{gains[0]:.2%} {gains[-1]:.2%}"))
    agents = rows(source_of("noise_metric"))
    for name in list(agents[0])[3:]:
        values, unit = [number(row[name]) for row in agents], "°" * ("°" in agents[0][name])
        table.append((name, " ".join(f"{of(values):.4f}{unit}" for of in (min, max, np.median))))
    for n_steps in (125, 250, 500, 1000, 4000):
        folder = f"direction_quality/n_steps_{n_steps}".removesuffix("/n_steps_1000")
        differences = rows(source_of(folder).split("own score:")[1])
        table.append((n_steps, " ".join(f"{row[list(row)[1]]} ({row['95% interval']})" for row in differences[::-1])))
    return "\n".join(f"| {name} | {values} |" for name, values in table)


def test_each_marked_figure_is_that_of_its_source():
    text = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    marked = MARKED.findall(text)
    assert len(marked) > 70
    assert text.count("<!--") == 2 * len(marked), "a mark has no end"
    assert re.findall(r"^ *<!--\S+-->.+", text, re.MULTILINE) == [], "such a line would be no part of its paragraph"
    assert [(source, line) for source, figures in marked for line in lacking(figures, source_of(source))] == []


def leads(report: str) -> dict[tuple[str, str], set[str]]:
    """Where methods are significantly ahead of TRPO, by kind of returns."""
    known, found = finals(report), {}
    for row in rows(source_of(f"{report}#welch")):
        (method, other), task = row["first against second"].split(" against "), row["environment"]
        ahead = other == "trpo_matched" and known[task, method] > known[task, other]
        if ahead and number(row["corrected"]) < 0.05:
            found.setdefault((method, row["means of"]), set()).add(task.removesuffix("-v4"))
    return found


def test_what_the_pages_say_in_words():
    tables = {name: by_first(source_of(f"recommended#{name}")) for name in ("controls", "final-returns")}
    parts = {}
    for task, row in tables["controls"].items():
        ours, control = number(row["UATRPO"]), number(row["TRPO, same hyperparameters"])
        trpo = number(tables["final-returns"][task]["TRPO"])
        parts[task] = (control - trpo) / (ours - trpo)
    # on four environments, MatchedTRPO closes more than half of the gap
    assert sum(part > 0.5 for part in parts.values()) == 4
    published = highest_published()
    assert {task for task, ratio in published.items() if ratio > 1} == {"Humanoid", "Ant", "Walker2d", "Swimmer"}
    assert round(published["Humanoid"]) == 2
    # the preset is second of twenty, and fourth on the other seeds
    ranking, on_other_seeds = (list(by_first(text)) for text in source_of("search#ranking").split("On seeds"))
    preset = "batches of 2000 and target_kl 0.02"
    assert (ranking[1], len(ranking), on_other_seeds[3]) == (preset, 20, preset)
    # TRPO's best is the shorter step in every environment
    short, long, *_ = rows(source_of("small_batches_confirmation#scores"))
    assert [(row["method"], row["KL"]) for row in (short, long)] == [("damping 1", "0.005"), ("damping 1", "0.05")]
    assert all(number(short[task]) > number(long[task]) for task in REFERENCES)
    steps = {(row["method"], row["of the KL asked for"]) for row in rows(source_of("small_batches_confirmation#steps"))}
    assert steps == {("damping 1", "0.67"), ("damping 1", "0.77"), ("no uncertainty", "1.00")}
    assert (ratios_with_shrinkage() >= 2).sum() == 1
    agents = {path.relative_to(ROOT / "docs" / "agents").as_posix() for path in ROOT.glob("docs/agents/*/*_1")}
    assert {f"{row['agent']}_1" for row in rows(source_of("noise_metric"))} == agents
    two = {"HalfCheetah", "Walker2d"}
    final, last = {(PAPER, "final returns"): two, (SHRINKAGE, "final returns"): {*two, "Hopper"}}, "last evaluations"
    assert leads("adversarial_noise") == final | {(SHRINKAGE, last): two}
    assert leads("adversarial_noise_repeated") == final | {(SHRINKAGE, last): {"Walker2d"}}
    assert leads("paper/noise")[WITHOUT, "final returns"] == {"Hopper", "Walker2d"}


def test_hyperparameter_files_have_the_returns_of_the_reports():
    files = (
        (ROOT / f"sb3_uatrpo/hyperparams/{name}.yml").read_text("utf-8") for name in ("uatrpo", "uatrpo_small_batches")
    )
    preset, small = (re.findall(r"^# ([\d,]+)(?: (.+))?\n(\S+):", text, re.MULTILINE) for text in files)
    for task, row in by_first(source_of("recommended#versions")).items():
        for version in ("4", "5"):
            known = row[f"version {version}"].split(" ± ")[0].split()
            assert (known[0], "".join(known[1:]), f"{task}-v{version}") in preset
    theirs, _, ours, _ = rows(source_of("small_batches_confirmation#scores"))
    assert {env for *_, env in small} == REFERENCES.keys()
    for *values, env in small:
        scores = [number(value) / REFERENCES[env] for value in values]
        assert scores == pytest.approx([number(ours[env]), number(theirs[env])], abs=0.006), env
