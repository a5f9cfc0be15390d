"""
Do runs that other code repeated agree with the first ones? Applies the rule of benchmarks/results/adversarial_noise.

    python benchmarks/compare_repetitions.py --folder benchmarks/results/paper \\
        --repeated benchmarks/results/adversarial_noise_repeated

For each run that is in both folders, it compares the episodes that end in the first timesteps: a run and its repetition
agree if these end at the same timesteps, with returns that differ by less than 1%. Later, rounding alone makes them
differ.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from command_line import parser_of
from evidence import markdown, read_runs

from sb3_uatrpo.study import Study, StudyError

SAME_RUN = ["env", "algo", "variant", "seed"]
TOLERANCE = 0.01


def compare(study: Study, repeated: Study, n_timesteps: int) -> list[dict[str, Any]]:
    """:return: a row for each run that is in both studies, with the first timestep at which they do not agree"""
    first, second = (of.runs[of.runs.error == ""].rename_axis("run").reset_index() for of in (study, repeated))
    rows = []
    for _, pair in first.merge(second, on=SAME_RUN).sort_values(SAME_RUN).iterrows():
        old, new = (
            episodes.loc[(episodes.run == run) & (episodes.step <= n_timesteps), ["step", "return"]].to_numpy(float)
            for episodes, run in ((study.episodes, pair.run_x), (repeated.episodes, pair.run_y))
        )
        both = min(len(old), len(new))
        differ = (old[:both, 0] != new[:both, 0]) | ~np.isclose(new[:both, 1], old[:both, 1], rtol=TOLERANCE, atol=0.0)
        # the episodes that only one of them has
        ends = np.concatenate([np.minimum(old[:both, 0], new[:both, 0])[differ], old[both:, 0], new[both:, 0]])
        row = {"environment": pair.env, "method": f"{pair.algo} ({pair.variant})" if pair.variant else pair.algo}
        row |= {"seed": pair.seed, "episodes, first and repeated": f"{len(old)}, {len(new)}"}
        row |= {"agree until timestep": f"{ends.min() if len(ends) else n_timesteps:,.0f}"}
        rows.append(row | {"verdict": "differ" if len(ends) else "agree"})
    return rows


def main(args: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the first runs")
    parser.add_argument("--repeated", type=Path, required=True, help="folder of their repetitions")
    parser.add_argument("--n-timesteps", type=int, default=10_000, help="timesteps compared, by default 10,000")
    options = parser.parse_args(args)
    try:
        rows = compare(read_runs(options.folder), read_runs(options.repeated), options.n_timesteps)
    except StudyError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"--repeated: no finished run of {options.repeated} is in {options.folder}")
    print(markdown(rows))
    counts = pd.DataFrame(rows).groupby("environment").verdict.agg(lambda of: (of == "agree").sum())
    print(f"\nRuns that agree: {', '.join(f'{environment} {n}' for environment, n in counts.items())}")


if __name__ == "__main__":
    main()
