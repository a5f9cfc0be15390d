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
from tests.tables import rows, section

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
    assert "no task has several runs of both" in printed
    study = read_study(RESULTS / "first")
    chosen = study.runs.index[(study.runs.algo == "uatrpo") & (study.runs.env == "Hopper-v4")]
    by_run = [study.episodes[study.episodes.run == i] for i in chosen]
    returns = [final_return(of.step, of["return"], 300_000) for of in by_run]
    updates = study.updates[study.updates.run.isin(chosen)]
    ratios = updates.kl_ratio.dropna()
    (row,) = (
        of for of in rows(printed) if (of.get("task"), of.get("method")) == ("Hopper-v4", "uatrpo (paper-batches)")
    )
    # one fifth of four runs is a part of the worst
    assert row.pop("20%-CVaR").startswith(f"{min(returns):,.0f} (")
    assert row.pop("last evaluation") == "3,437 ± 79"
    assert list(row.values())[2:] == [
        "4",
        f"{np.mean(returns):,.0f} ± {np.std(returns, ddof=1) / 2:,.0f}",
        ", ".join(f"{value:,.0f}" for value in sorted(returns)),
        f"{np.median(ratios):.2f}",
        f"{np.mean(ratios >= 2):.1%}",
        f"{updates.kl_proposed.mean():.4f}",
        f"{updates.kl_divergence_loss.mean():.4f}",
        f"{np.mean(updates.step_fraction < 1):.1%}",
    ]


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

    def judged(*arguments: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        main(["--folder", str(tmp_path), *arguments])
        printed = capsys.readouterr().out
        pairs = rows(section(printed, "Mean of the final returns: verdict, difference, 95% interval"))
        verdicts = [(row["first against second"], row["Hopper-v4"].split(" (")[0]) for row in pairs]
        return [(row["method"], row["final return"]) for row in rows(printed) if "method" in row], verdicts

    batches, without = "uatrpo (paper-batches)", "uatrpo (paper-batches, uncertainty_coef=0)"
    table, compared = judged()
    assert sorted(table) == [(batches, "201 ± 1"), (without, "401 ± 1"), ("uatrpo_paper", "101 ± 1")]
    assert compared == [
        (f"{batches} against uatrpo_paper", "better: +100"),
        (f"{without} against {batches}", "better: +200"),
        (f"{without} against uatrpo_paper", "better: +300"),
    ]
    table, compared = judged("--noise", "1")
    assert table == [("trpo_matched", "51 ± 1"), (without, "301 ± 1")]
    assert compared == [(f"{without} against trpo_matched", "better: +250")]
    assert judged("--pair", "uatrpo_paper", without)[1] == [(f"uatrpo_paper against {without}", "worse: -300")]


def test_other_algorithms_may_have_a_folder_of_their_own(tmp_path, capsys):
    for seed in range(5):
        write_run(tmp_path / "ours", "uatrpo_paper", seed=seed, final=200.0 + seed)
    for seed in range(3):
        for folder in ("theirs", "copy"):
            write_run(tmp_path / folder, "ppo", seed=seed, final=100.0 + seed)
    # a failed repetition elsewhere changes nothing
    write_run(tmp_path / "copy", "uatrpo_paper", seed=0, failed=True)
    main(["--folder", str(tmp_path / "ours")])
    assert "fewer than 5 runs" not in capsys.readouterr().out
    main(["--folder", *(str(tmp_path / folder) for folder in ("ours", "theirs", "copy"))])
    printed = capsys.readouterr().out
    for said in (
        "uatrpo_paper | 5 | 202 ± 1 ",
        "ppo | 3 | 101 ± 1 ",
        "against ppo | better: +101 (",
        "fewer than 5 runs",
    ):
        assert said in printed


def test_evaluations_are_compared_where_there_are_some(tmp_path, capsys):
    """Each run's own last evaluation, with a test of its own: training returns of these methods are the same."""
    for seed, (first, second, third) in enumerate([(300.0, 100.0, 0.0), (310.0, 111.0, 0.0), (290.0, 90.0, 0.0)]):
        for algo, level in (("uatrpo_paper", first), ("trpo_matched", second), ("ppo", third)):
            place = write_run(tmp_path, algo, seed=seed, eval_freq=2_000 if level else 0)
            if level:
                results = [[0.0, 0.0], [level - 1.0, level + 1.0]]
                np.savez(place / "evaluations.npz", timesteps=[2_000, 4_000], results=results)
    main(["--folder", str(tmp_path), "--report", str(tmp_path / "judged.md")])
    table = rows((tmp_path / "judged.md").read_text("utf-8"))
    shown = {row["method"]: row["last evaluation"] for row in table if "method" in row}
    assert shown == {"uatrpo_paper": "300 ± 6", "trpo_matched": "100 ± 6", "ppo": "–"}
    verdicts = [row["Hopper-v4"] for row in table if "Hopper-v4" in row]
    assert [verdict.split(" (")[0] for verdict in verdicts][-1] == "better: +200"
    p = welch_test(np.array([300.0, 310.0, 290.0]), np.array([100.0, 111.0, 90.0]))[1]
    (of_evaluations,) = (row for row in table if row.get("means of") == "last evaluations")
    assert of_evaluations["p"] == of_evaluations["corrected"] == f"{p:.3f}"
    said = "uatrpo_paper against ppo, mean of the last evaluations: no task has several runs of both"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "noise", "more"),
    [
        ("paper/plain", 0, []),
        ("paper/noise", 1, []),
        ("paper_every_tenth", 0, []),
        ("first", 0, []),
        ("pilot", 0, []),
        ("pilot/noise", 1, []),
        ("adversarial_noise", 1, []),
        ("adversarial_noise_repeated", 1, ["adversarial_noise"]),
    ],
)
def test_the_reports_are_those_of_the_committed_runs(tmp_path, report, noise, more, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [f"benchmarks/results/{name}" for name in (*more, re.sub("/plain|/noise", "", report))]
    page = tmp_path / "new" / "judged.md"
    main(["--folder", *folders, "--noise", str(noise), "--report", str(page)])
    assert (RESULTS / report / "judged.md").read_text("utf-8") == page.read_text("utf-8")
