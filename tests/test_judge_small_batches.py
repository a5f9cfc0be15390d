"""The rule on small batches, on made-up runs whose outcome is known."""

import itertools
from pathlib import Path

import judge_small_batches as module
import numpy as np
import pandas as pd
import pytest

from sb3_uatrpo.study import Study

ROOT = Path(__file__).parents[1]
KLS = ("0.005", "0.02", "0.05")
SIZES = (250, 1000)
ENVS = ("HalfCheetah-v4", "Walker2d-v4", "Hopper-v4")


def study(level, n_seeds=4) -> Study:
    """``level`` takes method, size, KL and seed, and returns the score of all episodes, or None if the run failed."""
    runs, episodes, updates, evaluations = [], [], [], []
    cells = [(m, s, kl) for m in module.METHODS[:5] for s in SIZES for kl in KLS]
    cells += [(module.CONTRIB, 250, kl) for kl in KLS]
    cells += [(m, s, None) for m in (module.LONG, module.SHORT) for s in SIZES]
    for (method, size, kl), env, seed in itertools.product(cells, ENVS, range(n_seeds)):
        parts = [method] * (method != module.CONTRIB) + [f"{size} steps"] * (method != module.CONTRIB)
        variant = " ".join([*parts, *([f"KL {kl}"] if kl else [])])
        score = level(method, size, kl and float(kl), seed)
        algo = "trpo" if method == module.CONTRIB else "uatrpo"
        error = "" if score is not None else "failed"
        runs.append({"algo": algo, "env": env, "seed": seed, "variant": variant, "n_timesteps": 1000, "error": error})
        if score is None:
            continue
        value = score * module.REFERENCES[env]
        run = {"run": len(runs) - 1}
        episodes += [run | {"step": step, "return": value} for step in range(50, 1001, 50)]
        updates += [run | {"step": 250, "kl_divergence_loss": 0.01, "kl_ratio": ratio} for ratio in (1.0, 3.0)]
        evaluations += [run | {"step": step, "return": step / 1000 * value} for step in (500, 1000)]
    return Study(*map(pd.DataFrame, (runs, episodes, updates, evaluations)))


def verdicts_of(level) -> list[str]:
    return module.verdicts(module.judge(module.scores_of(study(level)))[1])


def test_a_clear_lead_holds_and_is_due_to_the_part_without_which_it_is_gone():
    better = {module.PRESET, "no uncertainty"}
    table = module.scores_of(study(lambda method, size, kl, seed: (0.9 if method in better else 0.5) + 0.01 * seed))
    values, differences = module.judge(table)
    lengths = "; ".join(f"{size} steps, {length}" for size in SIZES for length in module.LENGTHS)
    tuning = [f"needs less tuning at {size} steps: holds" for size in SIZES]
    both = [
        f"{who}: {of}"
        for who in ("preset", "without the uncertainty term")
        for of in (*tuning, "does better with little data: holds")
    ]
    assert module.verdicts(differences) == [
        *both,
        *(f"needs no target_kl at {size} steps: does not hold" for size in SIZES),
        f"averages: {lengths}",
        *(f"{part}: nowhere above zero" for part in ("uncertainty", "shrinkage", "shrinkage, paper's length")),
    ]
    pairs = set(differences.pair[(differences.about == "lead") & (differences.steps == 1000)])
    assert pairs == {"preset - damping 1", "preset - damping 0.1"}
    assert values.value[values.method == "preset"].to_numpy() == pytest.approx(0.915)


OF_KL = {0.005: 0.2, 0.02: 0.5, 0.05: 0.8}


@pytest.mark.parametrize(("of_the_paper", "verdict"), [(0.6, "holds"), (0.5, "does not hold")])
def test_the_papers_length_leads_if_it_beats_the_mean_step_of_every_trpo(of_the_paper, verdict):
    found = verdicts_of(lambda method, size, kl, seed: OF_KL.get(kl, of_the_paper) + 0.01 * seed)
    assert found[6:8] == [f"needs no target_kl at {size} steps: {verdict}" for size in SIZES]


def test_one_rival_that_does_as_well_is_enough_against_it():
    noise = iter(np.random.default_rng(0).normal(0.0, 0.1, 10_000))
    found = verdicts_of(lambda method, size, kl, seed: 0.5 * (method != "damping 1") + next(noise) + 1.0)
    assert found[2] == "preset: does better with little data: does not hold"


def test_step_lengths_are_chosen_by_the_mean_over_seeds():
    values, _ = module.judge(module.scores_of(study(lambda method, size, kl, seed: OF_KL.get(kl, 0.1), n_seeds=2)))
    for length, score in {"worst": 0.2, "best": 0.8, "mean": 0.5}.items():
        found = values[(values.method == "damping 1") & (values.length == length)]
        assert found[["value", "low", "high"]].to_numpy() == pytest.approx(score)


def test_the_iqm_of_resamples_is_that_of_each():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 3, 4))
    drawn = module.resampled(scores, rng)
    assert drawn.shape == (module.N_RESAMPLES, 3, 3, 4)
    for length in module.LENGTHS:
        every = module.iqm(drawn, length)
        for i in (0, 17):
            means = drawn[i].mean(axis=-1)
            place = {"worst": means.argmin(1), "best": means.argmax(1)}
            chosen = [drawn[i][e][place[length][e]] for e in range(3)] if length in place else drawn[i].mean(axis=1)
            assert every[i] == pytest.approx(np.sort(np.ravel(chosen))[3:-3].mean())
    # nothing leaves its environment and step length
    assert all(set(drawn[:9, e, k].flat) <= set(scores[e, k]) for e in range(3) for k in range(3))


def test_resamples_of_environments_draw_the_seeds_of_each_copy_apart():
    scores = np.arange(24.0).reshape(3, 2, 4)
    environments = np.tile([2, 0, 2], (module.N_RESAMPLES, 1))
    drawn = module.resampled(scores, np.random.default_rng(0), environments)
    assert set(drawn[:, 0, 1].flat) == set(drawn[:, 2, 1].flat) == set(scores[2, 1])
    assert set(drawn[:, 1, 0].flat) == set(scores[0, 0])
    assert (drawn[:, 0] != drawn[:, 2]).any()


def test_an_interval_that_covers_other_environments_is_wider_where_they_differ():
    """One method leads by 0.2 in one environment, and by nothing in the two others."""
    runs = study(lambda method, size, kl, seed: 0.5 + 0.01 * seed)
    places = runs.runs.index[(runs.runs.env == "Hopper-v4") & runs.runs.variant.str.startswith("preset")]
    led = runs.episodes.run.isin(places)
    runs.episodes.loc[led, "return"] += 0.2 * module.REFERENCES["Hopper-v4"]
    _, differences = module.judge(module.scores_of(runs))
    of_mean = differences.query(
        "pair == 'preset - damping 1' and steps == 250 and score == 'final' and length == 'mean'"
    )
    (row,) = of_mean.to_dict("records")
    # all three environments may be the one, or none
    assert row["wide low"] < row["low"] < row["value"] < row["high"] < row["wide high"]
    assert row["wide high"] == pytest.approx(0.2, abs=0.02)


def test_a_failed_run_counts_as_the_worst_of_its_environment():
    level = {("preset", 0): None, ("preset", 1): 1.1}
    table = module.scores_of(study(lambda method, size, kl, seed: level.get((method, seed), 0.1 + seed), n_seeds=2))
    failed = table[(table.method == "preset") & (table.seed == 0)]
    assert failed.final.to_numpy() == pytest.approx(0.1)
    assert failed["realised KL"].isna().all()


def test_steps_and_areas():
    table = module.scores_of(study(lambda method, size, kl, seed: 0.5, n_seeds=1))
    assert table["over twice"].to_numpy() == pytest.approx(0.5)
    assert table["realised KL"][table.env == "Hopper-v4"].max() == pytest.approx(0.03)
    episodes = pd.DataFrame({"step": [150, 180, 1003], "return": [1.0, 3.0, 8.0]})
    # parts without an episode take the part before, the first one the next
    assert module.area(episodes, 1000) == pytest.approx((9 * 2.0 + 8.0) / 10)


@pytest.mark.parametrize("folder", ["small_batches", "small_batches_confirmation"])
def test_the_reports_are_those_of_the_committed_runs(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(module, "draw", lambda *_: None)
    results = ROOT / "benchmarks" / "results" / folder
    module.main(["--folder", str(results), "--report", str(tmp_path)])
    assert (tmp_path / "report.md").read_text("utf-8") == (results / "report.md").read_text("utf-8")


def test_pictures_are_drawn(tmp_path):
    table = module.scores_of(study(lambda method, size, kl, seed: 0.5 + 0.02 * seed))
    module.draw(table, "KL", "final", tmp_path / "a.png")
    module.draw(table, "realised KL", "area", tmp_path / "b.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("a.png", "b.png"))


def test_only_seeds_with_all_of_their_runs_count():
    table = module.scores_of(study(lambda method, size, kl, seed: 0.5, n_seeds=3))
    n_runs = module.runs_of_a_seed((ROOT / module.FOLDER).glob("*.yml"))
    assert set(module.whole_seeds(table[1:], n_runs).seed) == {1, 2}
    with pytest.raises(module.StudyError, match="no seed has all of its 111 runs"):
        module.whole_seeds(table[table.seed == 0][1:], n_runs)


def test_a_confirmation_is_judged_by_what_it_has():
    better = "no uncertainty"
    every = module.scores_of(study(lambda method, size, kl, seed: 0.5 + 0.2 * (method == better) + 0.01 * seed))
    table = every[(every["size"] == 250) & every.KL.isin([0.005, 0.05]) & every.method.isin([better, "damping 1"])]
    assert module.verdicts(module.judge(module.whole_seeds(table, 12))[1]) == [
        "without the uncertainty term: needs less tuning at 250 steps: holds",
        "without the uncertainty term: does better with little data: holds",
    ]
    assert "| 250 | no uncertainty | 0.005 | 0.71 ± 0.01 | 0.71 ± 0.01 | 0.71 ± 0.01 |" in module.report(table)
