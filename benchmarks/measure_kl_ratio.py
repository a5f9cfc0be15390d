"""
Do proposed steps have the KL divergence that the algorithm expects? UATRPO and the matched TRPO compared.

    python benchmarks/measure_kl_ratio.py --env Hopper-v4 HalfCheetah-v4 --seed 0 1 --n-timesteps 150000 --jobs 2

A small study: it trains each algorithm in each environment with each seed, prints a row for each run, and draws
learning curves beside histograms of the ratio. Runs with a record in the folder are not repeated.
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sb3_uatrpo.study import Record, StudyError
from sb3_uatrpo.study.driver import ProcessExecutor, run_study
from sb3_uatrpo.study.folders import StudyFolder
from sb3_uatrpo.study.plan import plan
from sb3_uatrpo.study.plots import plot_kl_ratio, plot_learning_curves, styles
from sb3_uatrpo.study.results import learning_curves, tabulate_runs, update_values

ALGORITHMS = ["uatrpo", "uatrpo_paper", "trpo_matched"]


def summary(record: Record, final_return: float) -> dict[str, object]:
    """One row of the table."""
    updates = pd.DataFrame(record.updates)
    ratio, fraction = updates["kl_ratio"].dropna(), updates["step_fraction"].dropna()
    return {
        "env": record.spec.env_id,
        "algorithm": record.spec.algo,
        "seed": record.spec.seed,
        "updates": len(fraction),
        "median ratio": round(float(ratio.median()), 2),
        "ratio in 0.5–2": f"{np.mean((ratio >= 0.5) & (ratio <= 2)):.0%}",
        "ratio ≥ 2": f"{np.mean(ratio >= 2):.0%}",
        "ratio ≥ 3": f"{np.mean(ratio >= 3):.0%}",
        "mean proposed KL": round(float(updates["kl_proposed"].mean()), 4),
        "steps cut back": f"{np.mean(fraction < 1):.0%}",
        "refused": f"{np.mean(fraction == 0):.0%}",
        "final return": round(final_return, 1),
    }


def draw(runs: pd.DataFrame) -> Figure:
    """For each environment: training returns, and the ratios of all runs of an algorithm."""
    style = styles(list(runs["algorithm"].unique()))
    environments = list(runs.groupby("environment"))
    figure, axes = plt.subplots(
        len(environments), 2, figsize=(9, 3.2 * len(environments)), layout="constrained", squeeze=False
    )
    for (left, right), (env, trained) in zip(axes, environments, strict=True):
        groups = dict(list(trained.groupby("algorithm", sort=False)))
        plot_learning_curves(left, {algo: learning_curves(group) for algo, group in groups.items()}, style)
        plot_kl_ratio(right, {algo: update_values(group, "kl_ratio") for algo, group in groups.items()}, style)
        left.set_title(env)
        for ax in (left, right):
            ax.grid(alpha=0.3)
            ax.legend()
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
        specs = plan(options.algo, options.env, options.seed, options.n_timesteps, eval_freq=0)
        folder = StudyFolder(options.folder, create=True)
    except StudyError as error:
        parser.error(str(error))
    outcome = run_study(specs, folder, lambda: ProcessExecutor(options.jobs))
    if outcome.failed or outcome.n_skipped:
        sys.exit(f"{len(outcome.failed)} runs failed, and {outcome.n_skipped} have a corrupted record")

    runs = tabulate_runs([record for record in folder.read_all()[0] if record.spec in set(specs)])
    table = pd.DataFrame([summary(*row) for row in zip(runs["record"], runs["final_return"], strict=True)])
    picture: Path = options.picture or options.folder / f"kl_ratio_{options.n_timesteps}.png"
    figure = draw(runs)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    print(table.to_string(index=False))
    record = runs["record"].iloc[0]
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    print(f"\n{options.n_timesteps} steps a run; {record.machine['system']}, {versions}")
    print(f"picture: {picture}")
    return table


if __name__ == "__main__":
    main()
