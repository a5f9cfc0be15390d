"""
Why does the uncertainty term change so little? How close Σ is to F, measured on the committed agents.

    python benchmarks/measure_noise_metric.py --report benchmarks/results/noise_metric.md

Each policy is frozen, those of ``uatrpo_paper`` with the preset's shrinkage. Reference rollouts of 1,000 timesteps give
F* and Σ*, and their traces by Hutchinson's estimator with common random vectors. Further rollouts of ``--n-steps``
timesteps are updates of the preset that change nothing: the first ones fill the moving averages, and each of the rest
gives a direction v with the uncertainty term and, from the same random vectors and subsample, one without, and without
it one from other random vectors and another subsample. The table has medians over these rollouts:

- v'Σv/v'Fv on the reference (fresh), and on the batch that v comes from (own), where the direction fits the noise
- the angles, in the metric of F*, between the directions with and without the term, and between the two without
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch as th
from evidence import markdown
from measure_direction_quality import policy_estimates
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import RECOMMENDED, UATRPO
from sb3_uatrpo.trust_region_algorithm import PolicyEstimates

AGENTS = Path(__file__).parents[1] / "docs" / "agents"
REFERENCE_STEPS = 1000
# By then, the averages have forgotten 0.9^25 = 7% of what came before
ROLLOUTS_TO_FILL_THE_SKETCH = 25
N_PROBES = 50
# The second and third have no uncertainty term, and the third has other random vectors and another subsample
VARIANTS: list[tuple[int, dict[str, Any]]] = [(0, {}), (0, {"uncertainty_coef": 0.0}), (1, {"uncertainty_coef": 0.0})]


def load(agent: str, n_steps: int, seed: int = 0, **arguments: Any) -> UATRPO:
    """:return: the agent with an empty sketch and rollouts of this length, in environments of its own"""
    env_id = agent.partition("/")[2]
    folder = AGENTS / f"{agent}_1"
    arguments |= {"n_steps": n_steps, "shrinkage": RECOMMENDED["shrinkage"]}
    env = VecNormalize.load(str(folder / env_id / "vecnormalize.pkl"), make_vec_env(env_id, seed=10_000 + n_steps))
    env.training = False
    model = UATRPO.load(folder / f"{env_id}.zip", env=env, device="cpu", **arguments)
    model.sketch.clear()
    model._seed_generators(seed)
    return model


def rollout(model: UATRPO) -> PolicyEstimates:
    callback = CallbackList([])
    callback.init_callback(model)
    assert model.env is not None
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return policy_estimates(model)


def measure(agent: str, n_steps: int, n_reference: int, n_tests: int) -> dict[str, float]:
    """:return: medians over the test rollouts, by column of the table"""
    source = load(agent, REFERENCE_STEPS)
    source._setup_learn(10**9)
    references = []
    for _ in range(n_reference):
        references.append(rollout(source).whole)
        references[-1].quadratic_forms(th.zeros(references[-1].n_params))  # builds the graph of this buffer
    probes = th.randn(references[0].n_params, N_PROBES)
    traces = np.mean([[(probes * of).sum().item() for of in each.products(probes)] for each in references], axis=0)

    def on_fresh(v: th.Tensor) -> np.ndarray:
        return np.mean([each.quadratic_forms(v) for each in references], axis=0)

    def angle(v: th.Tensor, w: th.Tensor) -> float:
        v, w = (x / math.sqrt(on_fresh(x)[0]) for x in (v, w))
        # from the difference, whose square is 2 - 2·cos
        return math.degrees(2 * math.asin(min(1.0, math.sqrt(on_fresh(v - w)[0]) / 2)))

    acting = load(agent, n_steps)
    acting._setup_learn(10**9)
    models = [load(agent, n_steps, seed, **arguments) for seed, arguments in VARIANTS]
    rows = []
    for i in range(ROLLOUTS_TO_FILL_THE_SKETCH + n_tests):
        rollout(acting)
        found = []
        for model, (seed, _) in zip(models, VARIANTS, strict=True):
            model.rollout_buffer = acting.rollout_buffer
            model.subsample_generator = np.random.default_rng([i, seed])
            estimates = policy_estimates(model)
            found.append((estimates, model._find_direction(estimates).vector))
        if i >= ROLLOUTS_TO_FILL_THE_SKETCH:
            (estimates, v), (_, without), (_, other) = found
            (fresh_f, fresh_s), (own_f, own_s) = on_fresh(v), estimates.whole.quadratic_forms(v)
            rows.append(
                {"c·R_n²": models[0]._coefficient(estimates), "fresh": fresh_s / fresh_f, "own": own_s / own_f}
                | {"angle": angle(v, without), "other": angle(without, other)}
            )
    return {"traces": traces[1] / traces[0], **pd.DataFrame(rows).median().to_dict()}


def main(args: list[str] | None = None) -> str:
    """:return: the table in Markdown"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    agents = [str(path.relative_to(AGENTS)).removesuffix("_1") for path in sorted(AGENTS.glob("*/*_1"))]
    parser.add_argument("--agent", nargs="+", choices=agents, default=agents)
    parser.add_argument("--n-steps", nargs="+", type=int, default=[250, 2000], help="timesteps per update")
    parser.add_argument("--reference-rollouts", type=int, default=15)
    parser.add_argument("--test-rollouts", type=int, default=20)
    parser.add_argument("--report", type=Path, help="a file for the table, in Markdown")
    options = parser.parse_args(args)
    th.set_num_threads(1)
    rows = []
    for agent in options.agent:
        for n_steps in options.n_steps:
            th.manual_seed(0)
            found = measure(agent, n_steps, options.reference_rollouts, options.test_rollouts)
            rows.append(
                {"agent": agent, "timesteps per update": n_steps, "c·R_n²": f"{found['c·R_n²']:.1f}"}
                | {"tr Σ*/tr F*": f"{found['traces']:.2f}"}
                | {f"v'Σv/v'Fv, {of}": f"{found[of]:.2f}" for of in ("fresh", "own")}
                | {
                    "angle to v without the term": f"{found['angle']:.0f}°",
                    "without, redrawn": f"{found['other']:.0f}°",
                }
            )
            print(rows[-1], flush=True)
    table = markdown(rows)
    if options.report:
        text = "`python benchmarks/measure_noise_metric.py` writes this table; its docstring explains the columns."
        options.report.write_text(f"# How close is Σ to F?\n\n{text}\n\n{table}\n", encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
