"""
Does UATRPO need less tuning than TRPO, or do better, with small batches? Applies the rule in the folder's README.

    python benchmarks/judge_small_batches.py --report benchmarks/results/small_batches
    python benchmarks/judge_small_batches.py --folder benchmarks/results/small_batches_confirmation

It prints what each method reaches with the worst, the best and the mean step length, the differences that the rule is
about, and the verdicts. ``--report`` writes the same into report.md, and draws the scores by the KL divergence that was
asked for (flat lines: the paper's step length, which asks for none) and by the one that was realised: means over seeds,
with the 95% percentile intervals of bootstrap resamples.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from command_line import parser_of
from evidence import markdown
from scipy import stats

from sb3_uatrpo.study import Study, StudyError, read_study
from sb3_uatrpo.study.statistics import bootstrap_mean, final_return

FOLDER = Path("benchmarks/results/small_batches")
# Final returns of uatrpo.yml after a million timesteps: a score of 1
REFERENCES = {
    "HalfCheetah-v4": 5364.0,
    "Walker2d-v4": 3664.0,
    "Hopper-v4": 3465.0,
    "Swimmer-v4": 356.0,
    "Ant-v4": 3330.0,
    "Humanoid-v4": 785.0,
}
# sb3-contrib's TRPO takes the mean of the KL divergence over the action's dimensions
N_ACTIONS = {"HalfCheetah-v4": 6, "Walker2d-v4": 6, "Hopper-v4": 3}
PRESET, CONTRIB = "preset", "contrib"
TRPO = ("damping 1", "damping 0.1", CONTRIB)
LONG, SHORT = "paper length shrinkage 0.75", "paper length shrinkage 0"
METHODS = (PRESET, "no uncertainty", "no averages", *TRPO, LONG, SHORT)
# In figures
NAMES = {
    PRESET: "UATRPO",
    "no uncertainty": "UATRPO without the uncertainty term",
    "no averages": "UATRPO without averages, all timesteps in F̂ and Σ̂",
    "damping 1": "MatchedTRPO, damping 1",
    "damping 0.1": "MatchedTRPO, damping 0.1",
    CONTRIB: "sb3-contrib's TRPO",
    LONG: "UATRPO, paper's step length",
    SHORT: "UATRPO without shrinkage, paper's step length",
}
SMALL = 250
#: What is compared with every TRPO
LEADS = {"lead": PRESET, "lead without uncertainty": "no uncertainty", "lead without target_kl": LONG}
#: Not in the rule: what is left of the leads without the moving averages
WITHOUT_AVERAGES = ("lead without averages", "no averages", "damping 1")
#: The second was not in the rule: the first study suggested it, and the confirmation tests it
TUNED = {"lead": "preset", "lead without uncertainty": "without the uncertainty term"}
#: What a part of the preset is judged by: with it, and without it
PARTS = {
    "averages": (PRESET, "no averages"),
    "uncertainty": (PRESET, "no uncertainty"),
    "shrinkage": ("no averages", "damping 0.1"),
    "shrinkage, paper's length": (LONG, SHORT),
}
SCORES = ("final", "area", "evaluation")
LENGTHS = ("worst", "best", "mean")
N_RESAMPLES = 10_000
N_PARTS = 10
#: Columns of the interval with environments drawn anew, too
WIDE = ("wide low", "wide high")


def scores_of(study: Study) -> pd.DataFrame:
    """:return: a row for each run: method, size, env, KL (NaN with the paper's length), seed, scores and steps"""
    series = {name: dict(list(getattr(study, name).groupby("run"))) for name in ("episodes", "updates", "evaluations")}
    rows = []
    for i, run in study.runs.iterrows():
        found = re.fullmatch(r"(?:(.+) (\d+) steps)? ?(?:KL (\S+))?", run.variant)
        assert found is not None, run.variant
        method, size, kl = found[1] or CONTRIB, int(found[2] or SMALL), float(found[3] or "nan")
        row = {"method": method, "size": size, "env": run.env, "KL": kl, "seed": run.seed}
        if not run.error:
            episodes, reference = series["episodes"][i], REFERENCES[run.env]
            evaluations = series["evaluations"][i]
            last = evaluations[evaluations.step == evaluations.step.max()]
            row["final"] = final_return(episodes.step, episodes["return"], run.n_timesteps) / reference
            row["area"] = area(episodes, run.n_timesteps) / reference
            row["evaluation"] = last["return"].mean() / reference
            row |= steps_of(series["updates"][i], N_ACTIONS[run.env] if run.algo == "trpo" else 1)
        rows.append(row)
    table = pd.DataFrame(rows)
    # by the rule, a run that failed twice counts as the worst of its environment
    worst = table.groupby("env")[list(SCORES)].transform("min")
    return table.fillna({name: worst[name] for name in SCORES})


def runs_of_a_seed(files: Iterable[Path]) -> int:
    """:return: the number of runs with each seed by these study files"""
    plans = [yaml.safe_load(path.read_text()) for path in files]
    return sum(len(plan["environments"]) * sum(map(len, plan["variants"].values())) for plan in plans)


def whole_seeds(table: pd.DataFrame, expected: int) -> pd.DataFrame:
    """
    :param expected: number of runs with each seed
    :return: the runs of those seeds of which all are there
    :raises StudyError: if there is no such seed
    """
    n_runs = table.groupby("seed").size()
    whole = table[table.seed.isin(n_runs.index[n_runs == expected])]
    if whole.empty:
        raise StudyError(f"no seed has all of its {expected} runs; there are {n_runs.to_dict()}")
    return whole


def area(episodes: pd.DataFrame, n_timesteps: int) -> float:
    """Mean over ten equal parts of the run of the mean return of the episodes that end in each."""
    part = ((episodes.step - 1) * N_PARTS // n_timesteps).clip(upper=N_PARTS - 1)
    means = episodes["return"].groupby(part).mean().reindex(range(N_PARTS))
    return float(means.ffill().bfill().mean())


def steps_of(updates: pd.DataFrame, n_dimensions: int) -> dict[str, float]:
    """The KL divergence of the steps that were taken, and the share of proposed ones with over twice the estimated."""
    found = {"realised KL": float(updates.kl_divergence_loss.mean()) * n_dimensions}
    if "kl_ratio" in updates:
        found["over twice"] = float((updates.kl_ratio.dropna() >= 2.0).mean())
    return found


def as_array(runs: pd.DataFrame, score: str) -> np.ndarray:
    """Scores of one method at one size, shape ``(n_envs, n_lengths, n_seeds)``."""
    cells = [list(of[score]) for _, of in runs.sort_values("seed").groupby(["env", "KL"], dropna=False)]
    return np.array(cells).reshape(runs.env.nunique(), -1, runs.seed.nunique())


def iqm(scores: np.ndarray, length: str) -> np.ndarray:
    """
    :param scores: shape ``(..., n_envs, n_lengths, n_seeds)``
    :param length: which step length: the worst or the best by the mean over seeds of each environment, or their mean
    :return: IQM over environments and seeds, shape ``(...)``
    """
    if length == "mean":
        chosen = scores.mean(axis=-2)
    else:
        means = scores.mean(axis=-1)
        place = means.argmin(axis=-1) if length == "worst" else means.argmax(axis=-1)
        chosen = np.take_along_axis(scores, place[..., None, None], axis=-2).squeeze(-2)
    return stats.trim_mean(chosen.reshape(*chosen.shape[:-2], -1), 0.25, axis=-1)


def resampled(scores: np.ndarray, rng: np.random.Generator, environments: np.ndarray | None = None) -> np.ndarray:
    """
    Seeds drawn anew within each environment and step length.

    :param environments: those of each resample, shape ``(n_resamples, n_envs)``; by default, each has each once
    :return: shape ``(n_resamples, *scores.shape)``
    """
    drawn = rng.integers(scores.shape[-1], size=(N_RESAMPLES, *scores.shape))
    return np.take_along_axis(scores[None] if environments is None else scores[environments], drawn, axis=-1)


def judge(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """
    :param table: what ``scores_of`` returns
    :return: the IQM of each method, and the differences that the rule is about, each with its 95% interval; of the
        differences, also that of resamples in which environments are drawn anew, too, the same ones for both methods
    """
    rng, rng_of_environments = np.random.default_rng(0), np.random.default_rng(1)
    values, differences = [], []
    for size, at_size in table.groupby("size"):
        groups = dict(list(at_size.groupby("method")))
        pairs = [(lead, ours, other) for lead, ours in LEADS.items() for other in TRPO]
        pairs += [WITHOUT_AVERAGES, *((part, *pair) for part, pair in PARTS.items())]
        n_envs = at_size.env.nunique()
        environments = rng_of_environments.integers(n_envs, size=(N_RESAMPLES, n_envs))
        for score in SCORES:
            samples = {method: as_array(groups[method], score) for method in METHODS if method in groups}
            drawn = {method: resampled(scores, rng) for method, scores in samples.items()}
            widely_drawn = {
                method: resampled(scores, rng_of_environments, environments) for method, scores in samples.items()
            }
            for length in LENGTHS:
                found = {method: (iqm(samples[method], length), iqm(drawn[method], length)) for method in samples}
                wide = {method: iqm(scores, length) for method, scores in widely_drawn.items()}
                key = {"steps": size, "score": score, "length": length}
                values += [key | {"method": method} | interval(*found[method]) for method in samples]
                differences += [
                    key
                    | {"about": about, "pair": f"{x} - {y}"}
                    | interval(found[x][0] - found[y][0], found[x][1] - found[y][1])
                    | dict(zip(WIDE, bounds(wide[x] - wide[y]), strict=True))
                    for about, x, y in pairs
                    if x in found and y in found
                ]
    return pd.DataFrame(values), pd.DataFrame(differences)


def bounds(drawn: np.ndarray) -> np.ndarray:
    return np.percentile(drawn, [2.5, 97.5])


def interval(value: np.ndarray, drawn: np.ndarray) -> dict[str, float]:
    low, high = bounds(drawn)
    return {"value": float(value), "low": low, "high": high}


def verdicts(differences: pd.DataFrame) -> list[str]:
    """What the rule says, a sentence each. Evaluations are stated and do not decide."""
    deciding = differences[differences.score != "evaluation"]

    def holds(size: int, about: str, *lengths: str) -> bool:
        found = deciding[(deciding.steps == size) & (deciding.about == about) & deciding.length.isin(lengths)]
        return len(found) > 0 and bool((found.low > 0).all())

    def sizes_of(about: str) -> list[int]:
        return sorted(deciding.steps[deciding.about == about].unique())

    sentences = []
    for about, who in TUNED.items():
        sentences += [
            f"{who}: needs less tuning at {size} steps: {yes(holds(size, about, 'worst'))}" for size in sizes_of(about)
        ]
        if SMALL in sizes_of(about):
            found = yes(holds(SMALL, about, "best", "mean"))
            sentences.append(f"{who}: does better with little data: {found}")
    about = "lead without target_kl"
    sentences += [f"needs no target_kl at {size} steps: {yes(holds(size, about, 'mean'))}" for size in sizes_of(about)]
    for part in PARTS:
        if sizes := sizes_of(part):
            where = [f"{size} steps, {length}" for size in sizes for length in LENGTHS if holds(size, part, length)]
            sentences.append(f"{part}: {'; '.join(where) or 'nowhere above zero'}")
    return sentences


def yes(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def as_markdown(table: pd.DataFrame, rows: list[str], columns: list[str]) -> str:
    """A cell for each interval."""
    cells = table.assign(
        cell=[f"{v:.2f} ({a:.2f} to {b:.2f})" for v, a, b in table[["value", "low", "high"]].to_numpy()]
    )
    wide = cells.pivot_table(index=rows, columns=columns, values="cell", aggfunc="first", sort=False).reset_index()
    wide.columns = [" ".join(part for part in map(str, name) if part) for name in wide.columns]
    return markdown(wide.fillna("–"))


def report(table: pd.DataFrame) -> str:
    values, differences = judge(table)
    steps = table.groupby(["size", "method", "KL"], dropna=False)
    of_steps = steps[["realised KL", "over twice"]].mean().reset_index()
    share = of_steps["realised KL"] / of_steps.KL
    of_steps.insert(4, "of the KL asked for", share.map(lambda of: "–" if np.isnan(of) else f"{of:.2f}"))
    of_steps["realised KL"] = of_steps["realised KL"].map("{:.4f}".format)
    of_steps["over twice"] = of_steps["over twice"].map(lambda share: "–" if np.isnan(share) else f"{share:.1%}")
    cells = table.groupby(["size", "method", "KL", "env"], dropna=False).final.agg(["mean", "sem"])
    of_envs = (cells["mean"].map("{:.2f}".format) + cells["sem"].map(" ± {:.2f}".format)).unstack("env").reset_index()
    seeds = sorted(table.seed.unique())
    return "\n\n".join(
        [
            "# Small batches and untuned steps: what the rule says",
            f"{len(table)} runs, seeds {', '.join(map(str, seeds))}. Printed by `benchmarks/judge_small_batches.py`.",
            "\n".join(f"- {sentence}" for sentence in verdicts(differences)),
            "## IQM of the scores",
            as_markdown(values, ["steps", "method"], ["score", "length"]),
            "## Differences",
            as_markdown(differences, ["steps", "about", "pair"], ["score", "length"]),
            "## Leads, with intervals that cover other environments",
            "Not in the rule: each resample draws the environments anew, too.",
            as_markdown(
                differences[differences.about.str.startswith("lead")].assign(
                    low=lambda of: of[WIDE[0]], high=lambda of: of[WIDE[1]]
                ),
                ["steps", "about", "pair"],
                ["score", "length"],
            ),
            "## Steps: mean KL divergence that was realised, and the share with over twice the estimated",
            markdown(of_steps.fillna("paper's")),
            "## Scores of final returns: mean ± standard error over seeds",
            markdown(of_envs.fillna({"KL": "paper's"})),
        ]
    )


def draw(table: pd.DataFrame, x: str, y: str, path: Path) -> None:
    """One panel for each environment and batch size; means over seeds with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(env, size) for size in sorted(table["size"].unique()) for env in sorted(table.env.unique())]
    methods = [method for method in METHODS if method in set(table.method)]
    n_rows = -(-len(panels) // 3)
    figure, grid = plt.subplots(
        n_rows, 3, figsize=(12, 2.9 * n_rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    asked_for = sorted(table.KL.dropna().unique())
    for axes, (env, size) in zip(grid.flat, panels, strict=False):
        for i, method in enumerate(methods):
            runs = table[(table.env == env) & (table["size"] == size) & (table.method == method)]
            if runs.empty:
                continue
            # the paper's length asks for no KL divergence: a flat line
            groups = [of for _, of in runs.groupby("KL")] or [runs] * len(asked_for)
            means = [bootstrap_mean(of[y]) for of in groups]
            # side by side, so that no interval hides another
            aside = 1.03 ** (i - (len(methods) - 1) / 2)
            axes.errorbar(
                [kl * aside for kl in asked_for] if x == "KL" else [of[x].mean() for of in groups],
                [mean.value for mean in means],
                [[mean.value - mean.low for mean in means], [mean.high - mean.value for mean in means]],
                label=NAMES[method], marker="osD^vPX*"[METHODS.index(method)], markersize=5, capsize=2,
                elinewidth=1, color=f"C{METHODS.index(method)}",
            )  # fmt: skip
        axes.set_title(f"{env}, {size:,} timesteps per update", fontsize="medium")
        axes.set_xscale("log")
        axes.set_xticks([0.005, 0.02, 0.05], ["0.005", "0.02", "0.05"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    grid[0, 0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel("KL divergence asked for (nats)" if x == "KL" else "mean KL divergence realised (nats)")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{y} score")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the study")
    parser.add_argument("--study", type=Path, nargs="+", help="study files of all runs (default: those in the folder)")
    parser.add_argument("--report", type=Path, help="folder for report.md and the pictures")
    options = parser.parse_args(args)
    try:
        files = options.study or options.folder.glob("*.yml")
        table = whole_seeds(scores_of(read_study(options.folder)), runs_of_a_seed(files))
    except StudyError as error:
        parser.error(f"--folder: {error}")
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--study: {error}")
    text = report(table)
    print(text)
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
        (options.report / "report.md").write_text(text + "\n")
        for y in ("final", "area"):
            draw(table, "KL", y, options.report / f"{y}_by_target.png")
            draw(table, "realised KL", y, options.report / f"{y}_by_realised.png")


if __name__ == "__main__":
    main()
