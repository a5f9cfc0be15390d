"""The rule that judges the study, on samples whose verdicts are plain."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from evidence import holm, judge
from judge_study import STATISTICS, main, recommendation

from sb3_uatrpo.study import read_study
from sb3_uatrpo.study.statistics import difference_of_means, final_return, welch_test
from tests.study.synthetic import write_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def runs(mean: float, spread: float, n: int = 10) -> np.ndarray:
    return mean + spread * np.linspace(-1.0, 1.0, n)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_verdicts(statistic):
    other = runs(1000.0, 10.0)
    samples = {
        "far above": (runs(1500.0, 10.0), other),
        "far below": (runs(500.0, 10.0), other),
        "equal": (runs(1000.0, 20.0), other),
        "wide": (runs(1000.0, 3000.0), other),
    }
    table = judge(samples, STATISTICS[statistic][1])
    assert dict(table["verdict"]) == {
        "far above": "better",
        "far below": "worse",
        "equal": "no worse",
        "wide": "worse" if "CVaR" in statistic else "undecided",
    }
    assert table.loc["far above", "of the other's mean"] == pytest.approx(0.5, abs=0.01)


def test_the_correction_over_tasks_is_holms():
    """One difference that is clear at 95% alone: alone it counts, among four tasks it does not."""
    rng = np.random.default_rng(0)
    null = {f"null {i}": (runs(1000.0, 50.0), runs(1000.0, 50.0)) for i in range(3)}
    for shift in np.linspace(0.0, 3.0, 61):
        x, y = 1000.0 + shift * 50.0 + 50.0 * rng.standard_normal(8), runs(1000.0, 50.0, 8)
        wide, narrow = (difference_of_means(x, y, confidence_level=1 - 0.05 / k) for k in (4, 1))
        if narrow.low > 0 >= wide.low:
            break
    else:
        pytest.fail("no sample is clear at 95% and not at 98.75%")
    assert judge({"marginal": (x, y)}, difference_of_means).loc["marginal", "verdict"] == "better"
    assert judge({"marginal": (x, y), **null}, difference_of_means).loc["marginal", "verdict"] != "better"
    # after three clear ones it is judged at 95% again
    clear = {f"clear {i}": (runs(2000.0, 50.0), runs(1000.0, 50.0)) for i in range(3)}
    assert set(judge({"marginal": (x, y), **clear}, difference_of_means)["verdict"]) == {"better"}


def test_p_values_are_corrected_by_holms_method():
    p_values = pd.Series([0.04, 0.001, 0.03, 0.02], index=list("abcd"))
    # 0.001·4, 0.02·3, 0.03·2 and 0.04·1, none below the one before
    assert holm(p_values, 4).round(12).to_dict() == {"a": 0.06, "b": 0.004, "c": 0.06, "d": 0.06}
    assert holm(pd.Series([0.6, 0.9]), 2).tolist() == [1.0, 1.0]
    # two of four tests are known
    assert holm(pd.Series([0.02, 0.01]), 4).round(12).tolist() == [0.06, 0.04]


def verdicts(*values: str) -> pd.DataFrame:
    return pd.DataFrame({"verdict": values})


@pytest.mark.parametrize(
    ("ours", "choice"),
    [
        (("better", "no worse"), "uatrpo (paper-batches)"),
        (("better", "undecided"), "uatrpo_paper"),
        (("no worse", "no worse"), "uatrpo_paper"),
        (("better", "worse"), "uatrpo_paper"),
    ],
)
@pytest.mark.parametrize("somewhere", [True, False])
def test_the_recommendation(ours, choice, somewhere):
    found = recommendation(
        {
            ("uatrpo_paper", "trpo_matched"): verdicts("undecided", "undecided"),
            ("uatrpo (paper-batches)", "trpo_matched"): verdicts("undecided", "better" if somewhere else "no worse"),
            ("uatrpo (paper-batches)", "uatrpo_paper"): verdicts(*ours),
        }
    )
    assert f"recommends {choice};" in found
    assert ("somewhere: uatrpo (paper-batches)" in found) is somewhere
    assert ("neither beats" in found) is not somewhere


def test_the_table_of_all_runs(capsys):
    main(["--folder", str(RESULTS / "first")])
    printed = capsys.readouterr().out
    study = read_study(RESULTS / "first")
    chosen = study.runs.index[(study.runs.algo == "uatrpo") & (study.runs.env == "Hopper-v4")]
    by_run = [study.episodes[study.episodes.run == i] for i in chosen]
    returns = [final_return(of.step, of["return"], 300_000) for of in by_run]
    updates = study.updates[study.updates.run.isin(chosen)]
    ratios = updates.kl_ratio
    (row,) = [line for line in printed.splitlines() if line.startswith("| Hopper-v4 | uatrpo (paper-batches) |")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2] == "4"
    assert cells[3] == f"{np.mean(returns):,.0f} ± {np.std(returns, ddof=1) / 2:,.0f}"
    # one fifth of four runs is a part of the worst
    assert cells[4].startswith(f"{min(returns):,.0f} (")
    assert cells[5] == ", ".join(f"{value:,.0f}" for value in sorted(returns))
    assert cells[7] == f"{np.nanmedian(ratios):.2f}"
    assert cells[8] == f"{np.mean(ratios[~np.isnan(ratios)] >= 2):.1%}"
    for cell, key in ((9, "kl_proposed"), (10, "kl_divergence_loss")):
        assert cells[cell] == f"{updates[key].mean():.4f}"
    assert cells[11] == f"{np.mean(updates.step_fraction < 1):.1%}"
    assert "no task has several runs of both" in printed


def test_variants_are_methods_of_their_own_and_noise_keeps_runs_apart(tmp_path, capsys):
    levels = {
        ("uatrpo_paper", ""): 100.0,
        ("uatrpo", "paper-batches"): 200.0,
        ("uatrpo", "paper-batches,uncertainty_coef=0"): 400.0,
        ("trpo_matched", "noise=1"): 50.0,
        ("uatrpo", "paper-batches,noise=1,uncertainty_coef=0"): 300.0,
    }
    for (algo, variant), final in levels.items():
        for seed in range(3):
            write_run(tmp_path, algo, seed=seed, final=final + seed, variant=variant)

    def judged(*arguments: str) -> tuple[list[list[str]], list[str]]:
        main(["--folder", str(tmp_path), *arguments])
        lines = capsys.readouterr().out.splitlines()
        table = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines if line.startswith("| Hopper")]
        section = "\n".join(lines).split("\n## Mean of the final returns")[1].split("\n## ")[0]
        return table, re.findall(r"^\| (\S.* against .+?) \| (?:better|worse)", section, re.MULTILINE)

    table, compared = judged()
    batches, without = "uatrpo (paper-batches)", "uatrpo (paper-batches, uncertainty_coef=0)"
    assert sorted(table) == [[batches, "3", "201 ± 1"], [without, "3", "401 ± 1"], ["uatrpo_paper", "3", "101 ± 1"]]
    assert compared == [
        f"{batches} against uatrpo_paper",
        f"{without} against {batches}",
        f"{without} against uatrpo_paper",
    ]
    main(["--folder", str(tmp_path)])
    assert f"| {batches} against uatrpo_paper | better: +100 (" in capsys.readouterr().out
    table, compared = judged("--noise", "1")
    assert [method for method, *_ in table] == ["trpo_matched", without]
    assert compared == [f"{without} against trpo_matched"]
    assert judged("--pair", "uatrpo_paper", without)[1] == [f"uatrpo_paper against {without}"]
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--pair", "uatrpo_paper", "ppo"])
    assert "--pair: there are no runs of 'ppo', only of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--noise", "2"])
    assert "no finished runs with noise 2" in capsys.readouterr().err


def test_other_algorithms_may_have_a_folder_of_their_own(tmp_path, capsys):
    for seed in range(5):
        write_run(tmp_path / "ours", "uatrpo_paper", seed=seed, final=200.0 + seed)
    for seed in range(3):
        for folder in ("theirs", "copy"):
            write_run(tmp_path / folder, "ppo", seed=seed, final=100.0 + seed)
    main(["--folder", str(tmp_path / "ours")])
    assert "fewer than 5 runs" not in capsys.readouterr().out
    main(["--folder", *(str(tmp_path / folder) for folder in ("ours", "theirs", "copy"))])
    # a failed repetition elsewhere changes nothing
    write_run(tmp_path / "copy", "uatrpo_paper", seed=0, failed=True)
    capsys.readouterr()
    main(["--folder", *(str(tmp_path / folder) for folder in ("ours", "theirs", "copy"))])
    printed = capsys.readouterr().out
    assert "uatrpo_paper | 5 | 202 ± 1 " in printed
    assert "| uatrpo_paper against ppo | better: +101 (" in printed
    assert "ppo | 3 | 101 ± 1 " in printed
    assert "fewer than 5 runs" in printed
    write_run(tmp_path / "copy", "ppo", seed=9, n_timesteps=77_000)
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path / "ours"), str(tmp_path / "copy")])
    assert "--folder: " in capsys.readouterr().err


def test_a_report_has_the_tables_in_markdown(tmp_path):
    for algo, final in (("uatrpo_paper", 200.0), ("trpo_matched", 100.0)):
        for seed in range(3):
            write_run(tmp_path, algo, seed=seed, final=final + seed)
    page = tmp_path / "new" / "judged.md"
    main(["--folder", str(tmp_path), "--report", str(page)])
    lines = page.read_text(encoding="utf-8").splitlines()
    assert f"`python benchmarks/judge_study.py --folder {tmp_path} --report FILE` writes this page." in lines
    assert [line for line in lines if line.startswith("| Hopper-v4 | uatrpo_paper | 3 | 201 ± 1 |")]
    # means, CVaRs and evaluations differ by as much
    assert sum(line.startswith("| uatrpo_paper against trpo_matched | better: +100 (") for line in lines) == 3
    for returns in ("final returns", "last evaluations"):
        assert f"| uatrpo_paper against trpo_matched | Hopper-v4 | {returns} | 0.000 | 0.000 |" in lines


def test_evaluations_are_compared_where_there_are_some(tmp_path, capsys):
    """Each run's own last evaluation, with a test of its own: training returns of these methods are the same."""
    for seed, (first, second, third) in enumerate([(300.0, 100.0, 0.0), (310.0, 111.0, 0.0), (290.0, 90.0, 0.0)]):
        for algo, level in (("uatrpo_paper", first), ("trpo_matched", second), ("ppo", third)):
            place = write_run(tmp_path, algo, seed=seed, eval_freq=2_000 if level else 0)
            if level:
                results = [[0.0, 0.0], [level - 1.0, level + 1.0]]
                np.savez(place / "evaluations.npz", timesteps=[2_000, 4_000], results=results)
    main(["--folder", str(tmp_path), "--report", str(tmp_path / "judged.md")])
    printed = capsys.readouterr().out
    lines = (tmp_path / "judged.md").read_text(encoding="utf-8").splitlines()
    shown = {
        line.split("|")[2].strip(): line.split("|")[7].strip() for line in lines if line.startswith("| Hopper-v4 | ")
    }
    assert shown == {"uatrpo_paper": "300 ± 6", "trpo_matched": "100 ± 6", "ppo": "–"}
    p = welch_test(np.array([300.0, 310.0, 290.0]), np.array([100.0, 111.0, 90.0]))[1]
    assert f"| uatrpo_paper against trpo_matched | Hopper-v4 | last evaluations | {p:.3f} | {p:.3f} |" in lines
    assert any(line.startswith("| uatrpo_paper against trpo_matched | better: +200 (") for line in lines)
    assert "uatrpo_paper against ppo, mean of the last evaluations: no task has several runs of both" in printed


def finals(report: str) -> dict[tuple[str, str], tuple[str, str]]:
    """:return: by environment and method, the final return and the median KL ratio that the report shows"""
    found = {}
    for line in report.split("\n## ")[0].splitlines():
        if line.count("|") > 10 and " ± " in line:
            task, method, _, returns, _, _, _, ratio, *_ = (cell.strip() for cell in line.split("|")[1:-1])
            found[task.removesuffix("-v4"), method] = returns, ratio
    return found


@pytest.mark.parametrize(
    ("folders", "report", "noise"),
    [
        (["paper"], "paper/plain", 0),
        (["paper"], "paper/noise", 1),
        (["paper_every_tenth"], "paper_every_tenth", 0),
        (["first"], "first", 0),
        (["pilot"], "pilot", 0),
        (["pilot"], "pilot/noise", 1),
        (["adversarial_noise"], "adversarial_noise", 1),
        (["adversarial_noise", "adversarial_noise_repeated"], "adversarial_noise_repeated", 1),
    ],
)
def test_the_reports_are_those_of_the_committed_runs(tmp_path, folders, report, noise, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = ["--folder", *(f"benchmarks/results/{folder}" for folder in folders), "--noise", str(noise)]
    main([*options, "--report", str(tmp_path / "judged.md")])
    assert (RESULTS / report / "judged.md").read_text("utf-8") == (tmp_path / "judged.md").read_text("utf-8")


@pytest.mark.parametrize("report", ["paper/plain", "adversarial_noise"])
def test_the_tables_of_the_page_show_the_reports(report):
    known = finals((RESULTS / report / "judged.md").read_text("utf-8"))
    section = (ROOT / "docs" / "results.md").read_text("utf-8").split("\n## The paper")[1].split("\n## ")[0]
    table = section.split("Under adversarial noise")[report == "adversarial_noise"]
    header, _, *rows = [
        line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|") and line.count("|") == 6
    ]
    shown = {
        (task.strip(), method.strip(" `")): cell.strip()
        for method, *cells in rows
        for task, cell in zip(header[1:], cells, strict=True)
    }
    assert len(shown) >= 12
    assert {place: cell for place, cell in shown.items() if "; ".join(known[place]) != cell} == {}


def significant_differences(report: str) -> dict[tuple[str, str], dict[str, float]]:
    """:return: by method and kind of returns, the environments in which it differs from TRPO, with corrected p"""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in report.split("\n## Welch")[1].splitlines():
        if " against trpo_matched | " in line and float(line.split("|")[-2]) < 0.05:
            pair, task, means, _, p = (cell.strip() for cell in line.split("|")[1:-1])
            found.setdefault((pair.split(" against ")[0], means), {})[task.removesuffix("-v4")] = float(p)
    return found


def test_the_page_says_how_many_ratios_are_large():
    study = read_study(RESULTS / "paper")
    runs = study.runs[(study.runs.algo == "uatrpo") & (study.runs.variant == "paper-batches")]
    ratios = study.updates.kl_ratio[study.updates.run.isin(runs.index)]
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert (ratios >= 2).sum() == 1
    assert f"holds: one of {len(ratios):,} is |" in page


def test_the_page_says_what_the_runs_under_adversarial_noise_show():
    page = " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())

    def higher(known: dict[tuple[str, str], tuple[str, str]], task: str, first: str, second: str) -> float:
        first_mean, second_mean = (float(known[task, of][0].split(" ± ")[0].replace(",", "")) for of in (first, second))
        return first_mean / second_mean - 1

    report = (RESULTS / "adversarial_noise" / "judged.md").read_text("utf-8")
    known, trpo, shrinkage = finals(report), "trpo_matched", "uatrpo (paper-batches)"
    significant = significant_differences(report)

    def lead(task: str, method: str) -> str:
        if task == "HalfCheetah":  # whose returns begin far below zero, so that percentages have no scale
            ours, theirs = (known[task, of][0].split(" ± ")[0] for of in (method, trpo))
            return f"{task} ({ours} against {theirs})"
        return f"{task} (+{higher(known, task, method, trpo):.0%})"

    leads = {
        method: {task: lead(task, method) for task in found}
        for (method, means), found in significant.items()
        if means == "final returns"
    }
    ours, theirs = leads[shrinkage], leads["uatrpo_paper"]
    assert f"| significant leads on {theirs['HalfCheetah']} and {theirs['Walker2d']}; level" in page
    assert f"| significant leads on {ours['HalfCheetah']}, {ours['Walker2d']} and {ours['Hopper']}; level" in page
    assert (len(theirs), len(ours)) == (2, 3)
    largest = {of: max(found.values()) for of, found in significant.items()}
    two, three = largest["uatrpo_paper", "final returns"], largest[shrinkage, "final returns"]
    assert f"two and three leads over TRPO are significant (p ≤ {two:.3f} and p ≤ {three:.3f})" in page
    last = {of: sorted(found) for of, found in significant.items() if of[1] == "last evaluations"}
    assert last == {(shrinkage, "last evaluations"): ["HalfCheetah", "Walker2d"]}
    assert f"HalfCheetah and Walker2d are significant (p ≤ {largest[shrinkage, 'last evaluations']:.3f})" in page

    # all ten seeds, of which 0 to 2 had been looked at
    report = (RESULTS / "adversarial_noise_repeated" / "judged.md").read_text("utf-8")
    known, all_ten = finals(report), significant_differences(report)
    p_values = [p for (_, means), found in all_ten.items() if means == "final returns" for p in found.values()]
    for method, tasks in leads.items():
        assert all_ten[method, "final returns"].keys() == tasks.keys()
        assert all(higher(known, task, method, trpo) > 0 for task in tasks)
    assert f"Seeds 0 to 9 give the same leads (p ≤ {max(p_values):.3f})," in page
    assert {of: list(found) for of, found in all_ten.items() if of[1] == "last evaluations"} == {
        (shrinkage, "last evaluations"): ["Walker2d"]
    }
    assert "and in the last evaluations only shrinkage's on Walker2d." in page

    # the earlier runs, which alone have a variant without the uncertainty term
    report = (RESULTS / "paper" / "noise" / "judged.md").read_text("utf-8")
    known = finals(report)
    without = "uatrpo (paper-batches, uncertainty_coef=0)"
    low, high = (known["HalfCheetah", of][0].split(" ± ")[0] for of in (without, shrinkage))
    assert f"HalfCheetah's mean is {low} instead of {high}" in page
    # which is ahead of TRPO, too
    ahead = significant_differences(report)[without, "final returns"]
    assert ahead.keys() == {"Hopper", "Walker2d"}
    by_lead = []
    for task, p in ahead.items():
        ours, theirs = (int(known[task, of][0].split(" ± ")[0].replace(",", "")) for of in (without, trpo))
        by_lead += [ours - theirs, p]
    assert "Hopper (+{}, p = {:.3f}) and Walker2d (+{}, p = {:.3f})".format(*by_lead) in page
    others = [higher(known, task, without, shrinkage) for task in ("Hopper", "Swimmer", "Walker2d")]
    assert f"The other three means are {min(others):.0%} to {max(others):.0%} higher without it." in page
