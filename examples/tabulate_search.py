"""
What did each lever of a search do?

    python examples/tabulate_search.py --folder docs/results/search

A row for each task and variant, over its runs: the final returns; the area under the learning curve, which is the mean
training return over the whole run and less noisy than the end; the critic's explained variance and the policy's mean
standard deviation in the last fifth of the updates; and the mean KL divergence of an update.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from judge_study import markdown

from sb3_uatrpo.study import StudyError, read_records
from sb3_uatrpo.study.results import learning_curves, tabulate_runs


def of_last_updates(runs: pd.DataFrame, key: str, share: float) -> str:
    """Mean of a logged value over the last updates of all runs; a dash if there is none."""
    logged = [np.array(record.updates.get(key, []), dtype=np.float64) for record in runs.record]
    last = np.concatenate([values[int(len(values) * (1 - share)) :] for values in logged])
    known = last[np.isfinite(last)]
    return f"{known.mean():.2g}" if len(known) else "–"


def main(args: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/results/search"))
    options = parser.parse_args(args)
    try:
        runs = tabulate_runs(read_records(options.folder / "records")[0])
    except StudyError as error:
        parser.error(f"--folder: {error}")
    runs = runs[runs.final_return.notna()]
    if runs.empty:
        parser.error(f"--folder: there are no finished runs in {options.folder / 'records'}")
    rows = []
    for (task, label), group in runs.groupby(["environment", "algorithm"]):
        areas = np.nanmean(learning_curves(group)[1], axis=1)
        rows.append(
            {
                "task": task,
                "setting": label.removeprefix("uatrpo").strip(" ()") or "base",
                "runs": len(group),
                "final return": f"{group.final_return.mean():,.0f}",
                "of each run": ", ".join(f"{value:,.0f}" for value in group.final_return),
                "area": f"{areas.mean():,.0f}",
                "explained variance": of_last_updates(group, "explained_variance", 0.2),
                "std": of_last_updates(group, "std", 0.2),
                "KL": of_last_updates(group, "kl_divergence_loss", 1.0),
            }
        )
    rows.sort(key=lambda row: (row["task"], -float(row["area"].replace(",", ""))))
    table = markdown(rows)
    print(table)
    return table


if __name__ == "__main__":
    main()
