"""
Do proposed steps have the KL divergence that the algorithm expects? UATRPO and the matched TRPO compared.

    python benchmarks/measure_kl_ratio.py --env Hopper-v4 HalfCheetah-v4 --seed 0 1 --n-timesteps 150000 --jobs 2

A small study: it trains each algorithm in each environment with each seed, prints a row for each run, and draws
learning curves beside histograms of the ratio. Runs that are in the folder are not repeated.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from sb3_uatrpo.study import Study, StudyError, read_study
from sb3_uatrpo.study.plan import plan
from sb3_uatrpo.study.results import learning_curves, tabulate
from sb3_uatrpo.study.run import run_study

ALGORITHMS = ["uatrpo", "uatrpo_paper", "trpo_matched"]


def summary(run: pd.Series, updates: pd.DataFrame) -> dict[str, object]:
    """One row of the table."""
    ratio, fraction = updates["kl_ratio"].dropna(), updates["step_fraction"].dropna()
    return {
        "env": run.env,
        "algorithm": run.algo,
        "seed": run.seed,
        "updates": len(fraction),
        "median ratio": round(float(ratio.median()), 2),
        "ratio in 0.5–2": f"{np.mean((ratio >= 0.5) & (ratio <= 2)):.0%}",
        "ratio ≥ 2": f"{np.mean(ratio >= 2):.0%}",
        "ratio ≥ 3": f"{np.mean(ratio >= 3):.0%}",
        "mean proposed KL": round(float(updates["kl_proposed"].mean()), 4),
        "steps cut back": f"{np.mean(fraction < 1):.0%}",
        "refused": f"{np.mean(fraction == 0):.0%}",
        "final return": round(run.final_return, 1),
    }


def draw(study: Study) -> Figure:
    """For each environment: training returns, and the ratios of all runs of an algorithm."""
    curves, updates = learning_curves(study).dropna(), study.updates.join(study.runs[["env", "label"]], on="run")
    environments = list(study.runs.env.unique())
    figure, axes = plt.subplots(
        len(environments), 2, figsize=(9, 3.2 * len(environments)), layout="constrained", squeeze=False
    )
    look = {"hue": "label", "hue_order": list(study.runs.label.unique()), "palette": "colorblind"}
    for (left, right), env in zip(axes, environments, strict=True):
        sns.lineplot(curves[curves.env == env], x="step", y="return", errorbar="se", ax=left, **look)
        ratios = updates[updates.env == env].assign(ratio=updates.kl_ratio.clip(0, 5))
        shares = {"stat": "probability", "common_norm": False, "element": "step", "binrange": (0, 5), "bins": 50}
        sns.histplot(ratios, x="ratio", ax=right, **shares, **look)
        left.set(title=env, xlabel="environment steps", ylabel="training return")
        right.set(xlabel="actual / estimated KL (≥ 5 at 5)", ylabel="share of updates")
        for ax in (left, right):
            ax.grid(alpha=0.3)
    return figure


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--n-timesteps", type=int, default=150_000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/kl_ratio"))
    parser.add_argument("--picture", type=Path, help="default: FOLDER/kl_ratio_N_TIMESTEPS.png")
    options = parser.parse_args(args)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, but it is {options.jobs}")
    if options.picture and not options.picture.parent.is_dir():
        parser.error(f"--picture: there is no folder {options.picture.parent}")
    try:
        planned = plan(options.algo, options.env, options.seed, options.n_timesteps, eval_freq=0)
        failed = run_study(planned, options.folder, options.jobs)
    except StudyError as error:
        parser.error(str(error))
    if failed:
        sys.exit(f"{len(failed)} runs failed; the first says why in {failed[0][1]}")

    study = tabulate(read_study(options.folder))
    asked = {str(options.folder / run.path) for run in planned}
    runs = study.runs[study.runs.folder.isin(asked)]
    study = replace(study, runs=runs)
    table = pd.DataFrame([summary(run, study.updates[study.updates.run == i]) for i, run in runs.iterrows()])
    picture: Path = options.picture or options.folder / f"kl_ratio_{options.n_timesteps}.png"
    figure = draw(study)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    print(table.to_string(index=False))
    versions = ", ".join(f"{name} {version}" for name, version in json.loads(runs.versions.iloc[0]).items())
    print(f"\n{options.n_timesteps} steps a run; {versions}")
    print(f"picture: {picture}")
    return table


if __name__ == "__main__":
    main()
