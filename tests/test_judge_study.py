"""The rule that judges the study, on samples whose verdicts are plain."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from judge_study import STATISTICS, judge, main, recommendation

from sb3_uatrpo.study import difference_of_means, final_return, read_records, write_record
from tests.study.synthetic import make_record

ROOT = Path(__file__).parents[1]


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
    table = judge(samples, STATISTICS[statistic])
    assert dict(table["verdict"]) == {
        "far above": "better",
        "far below": "worse",
        "equal": "no worse",
        "wide": "undecided" if statistic == "mean" else "worse",
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


def verdicts(*values: str) -> pd.DataFrame:
    return pd.DataFrame({"verdict": values})


@pytest.mark.parametrize(
    ("ours", "choice"),
    [
        (("better", "no worse"), "uatrpo_shrinkage"),
        (("better", "undecided"), "uatrpo"),
        (("no worse", "no worse"), "uatrpo"),
        (("better", "worse"), "uatrpo"),
    ],
)
@pytest.mark.parametrize("somewhere", [True, False])
def test_the_recommendation(ours, choice, somewhere):
    found = recommendation(
        {
            ("uatrpo", "trpo_matched"): verdicts("undecided", "undecided"),
            ("uatrpo_shrinkage", "trpo_matched"): verdicts("undecided", "better" if somewhere else "no worse"),
            ("uatrpo_shrinkage", "uatrpo"): verdicts(*ours),
        }
    )
    assert f"recommends {choice};" in found
    assert ("somewhere: uatrpo_shrinkage" in found) is somewhere
    assert ("neither beats" in found) is not somewhere


def test_the_table_of_all_runs(capsys):
    main(["--folder", str(ROOT / "docs" / "results" / "first")])
    printed = capsys.readouterr().out
    records, _ = read_records(ROOT / "docs" / "results" / "first" / "records")
    chosen = [r for r in records if (r.spec.algo, r.spec.env_id) == ("uatrpo_shrinkage", "Hopper-v4")]
    returns = [final_return(r.episodes["timesteps"], r.episodes["returns"], r.spec.n_timesteps) for r in chosen]
    ratios = np.concatenate([np.array(r.updates["kl_ratio"], dtype=float) for r in chosen])
    (row,) = [line for line in printed.splitlines() if line.startswith("| Hopper-v4 | uatrpo_shrinkage |")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2] == "4"
    assert cells[3] == f"{np.mean(returns):,.0f} ± {np.std(returns, ddof=1) / 2:,.0f}"
    # one fifth of four runs is a part of the worst
    assert cells[4].startswith(f"{min(returns):,.0f} (")
    assert cells[5] == ", ".join(f"{value:,.0f}" for value in sorted(returns))
    assert cells[6] == f"{np.nanmedian(ratios):.2f}"
    assert cells[7] == f"{np.mean(ratios[~np.isnan(ratios)] >= 2):.1%}"
    for cell, key in ((8, "kl_proposed"), (9, "kl_divergence_loss")):
        logged = np.concatenate([np.array(r.updates[key], dtype=float) for r in chosen])
        assert cells[cell] == f"{np.nanmean(logged):.4f}"
    fractions = np.concatenate([np.array(r.updates["step_fraction"], dtype=float) for r in chosen])
    assert cells[10] == f"{np.mean(fractions < 1):.1%}"
    assert "no task has several runs of both" in printed


def test_variants_are_methods_of_their_own_and_noise_keeps_runs_apart(tmp_path, capsys):
    levels = {
        ("uatrpo", ""): 100.0,
        ("uatrpo_shrinkage", ""): 200.0,
        ("uatrpo_shrinkage", "uncertainty_coef=0"): 400.0,
        ("trpo_matched", "noise=1"): 50.0,
        ("uatrpo_shrinkage", "noise=1,uncertainty_coef=0"): 300.0,
    }
    for (algo, variant), final in levels.items():
        for seed in range(3):
            write_record(make_record(algo, seed=seed, final=final + seed, variant=variant), tmp_path / "records")

    def judged(*arguments: str) -> tuple[list[list[str]], list[str]]:
        main(["--folder", str(tmp_path), *arguments])
        lines = capsys.readouterr().out.splitlines()
        table = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines if line.startswith("| Hopper")]
        return table, [line for line in lines if "mean of the final" in line]

    table, compared = judged()
    assert table == [
        ["uatrpo", "3", "101 ± 1"],
        ["uatrpo_shrinkage", "3", "201 ± 1"],
        ["uatrpo_shrinkage (uncertainty_coef=0)", "3", "401 ± 1"],
    ]
    assert compared == [
        "uatrpo_shrinkage against uatrpo, mean of the final returns",
        "uatrpo_shrinkage (uncertainty_coef=0) against uatrpo_shrinkage, mean of the final returns",
        "uatrpo_shrinkage (uncertainty_coef=0) against uatrpo, mean of the final returns",
    ]
    main(["--folder", str(tmp_path)])
    assert "| uatrpo_shrinkage against uatrpo | better: +100 (" in capsys.readouterr().out
    table, compared = judged("--noise", "1")
    assert [method for method, *_ in table] == ["trpo_matched", "uatrpo_shrinkage (uncertainty_coef=0)"]
    assert compared == ["uatrpo_shrinkage (uncertainty_coef=0) against trpo_matched, mean of the final returns"]
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--noise", "2"])
    assert "no finished runs with noise 2" in capsys.readouterr().err


def test_other_algorithms_may_have_a_folder_of_their_own(tmp_path, capsys):
    for seed in range(5):
        write_record(make_record("uatrpo", seed=seed, final=200.0 + seed), tmp_path / "ours" / "records")
    for seed in range(3):
        for folder in ("theirs", "copy"):
            write_record(make_record("ppo", seed=seed, final=100.0 + seed), tmp_path / folder / "records")
    main(["--folder", str(tmp_path / "ours")])
    assert "fewer than 5 runs" not in capsys.readouterr().out
    main(["--folder", *(str(tmp_path / folder) for folder in ("ours", "theirs", "copy"))])
    # a failed repetition elsewhere changes nothing
    write_record(make_record("uatrpo", seed=0, status="failed"), tmp_path / "copy" / "records")
    capsys.readouterr()
    main(["--folder", *(str(tmp_path / folder) for folder in ("ours", "theirs", "copy"))])
    printed = capsys.readouterr().out
    assert "uatrpo | 5 | 202 ± 1 " in printed
    assert "| uatrpo against ppo | better: +101 (" in printed
    assert "ppo | 3 | 101 ± 1 " in printed
    assert "fewer than 5 runs" in printed
    write_record(make_record("ppo", seed=9, n_timesteps=77_000), tmp_path / "copy" / "records")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path / "ours"), str(tmp_path / "copy")])
    assert "--folder: " in capsys.readouterr().err
