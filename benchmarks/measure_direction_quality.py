"""
How good is the direction that one rollout gives? Score each method's direction on frozen policies.

    python benchmarks/measure_direction_quality.py --env Hopper-v4 HalfCheetah-v4 --seeds 20 21 22 --jobs 2

UATRPO trains with the paper's settings. After each number of updates in ``--updates`` the policy is frozen. Many
rollouts then give a reference gradient g* and a reference Fisher matrix F*, and further single rollouts give each
variant's direction v. Its score is g*'v/√(v'F*v): the true first-order improvement per square root of the KL
divergence, whatever the length of the step. All variants see the same rollouts and subsamples, so differences are
paired. The table also has the KL ratio: the KL divergence of each step, ½η²v'F*v, divided by the method's own estimate.

``--n-steps`` changes the steps per update, in training and of each single rollout. Checkpoints and references then keep
their number of steps: those of ``--updates`` and ``--reference-rollouts`` with 1,000 steps each.

Each pair of task and seed has a file in ``--folder``. If the file exists, the measurement is not repeated; a file with
other settings is refused. ``--only`` leaves out all other variants but shrinkage 0.75, in whose score all are measured.
``report.md`` in the folder has the table, and how each method's score changes without the uncertainty term (c = 0).
"""

import json
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import torch as th
from command_line import parser_of, refuse_below
from evidence import markdown
from measuring import about, normalized
from scipy.stats import ttest_1samp
from stable_baselines3.common.callbacks import BaseCallback

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import rollout_batch
from sb3_uatrpo.buffers import count_trajectories
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.trust_region_algorithm import PolicyEstimates, TrustRegionAlgorithm

CLASSES: dict[str, type[UATRPO] | type[MatchedTRPO]] = {"UATRPO": UATRPO, "MatchedTRPO": MatchedTRPO}
SHRUNK = {"target_kl": 0.01, "step_length_samples": "batch"}
REFERENCE = "shrinkage 0.75"
GRADIENT = "plain gradient"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("UATRPO", {}),
    "paper, c = 0": ("UATRPO", {"uncertainty_coef": 0.0}),
    **{f"shrinkage {rho}": ("UATRPO", {"shrinkage": rho, **SHRUNK}) for rho in (0.5, 0.75, 0.9, 0.97)},
    "shrinkage 0.75, c = 0": ("UATRPO", {"shrinkage": 0.75, "uncertainty_coef": 0.0, **SHRUNK}),
    "shrinkage 0.75, nystrom": ("UATRPO", {"shrinkage": 0.75, "projection_solver": "nystrom", **SHRUNK}),
    "shrinkage 0.75, m = 100": ("UATRPO", {"shrinkage": 0.75, "n_projections": 100, **SHRUNK}),
    "shrinkage 0.75, all steps": ("UATRPO", {"shrinkage": 0.75, "sub_sampling_factor": 1, **SHRUNK}),
    **{f"TRPO, damping {x}": ("MatchedTRPO", {"cg_damping": x}) for x in (0.01, 0.03, 0.1, 0.3, 1.0)},
    **{
        f"TRPO, all steps, damping {x}": ("MatchedTRPO", {"cg_damping": x, "sub_sampling_factor": 1})
        for x in (0.01, 0.03, 0.1, 0.3, 1.0)
    },
}
# By then, the averages of the projections have forgotten all but 0.9^30 = 4% of what came before
UPDATES_TO_FILL_THE_SKETCH = 30
# Of the reference rollouts, the share that F* is averaged over: it needs fewer than the gradient
FISHER_SHARE = 6
# The critic's minibatches: UATRPO's default, or smaller where that does not divide the rollout
BATCH_SIZES = (50, 25, 5, 1)


def policy_estimates(model: TrustRegionAlgorithm) -> PolicyEstimates:
    """ĝ, F̂ and Σ̂ of the rollout that the model's buffer holds."""
    batch = rollout_batch(model.rollout_buffer, model.normalize_advantage)
    actor = Actor(model.policy)
    with actor.update_mode():
        actor.find_params(batch)
        return model._estimate(actor, batch, count_trajectories(model.rollout_buffer))


class Collector:
    """Rollouts of a frozen policy, in separate environments."""

    def __init__(self, model: TrustRegionAlgorithm, env_id: str, seed: int) -> None:
        training = model.get_vec_normalize_env()
        assert training is not None
        self.env = normalized(env_id, seed=seed, gamma=model.gamma)
        self.env.obs_rms, self.env.training = training.obs_rms, False
        sizes: dict[str, Any] = {"n_steps": model.n_steps, "batch_size": model.batch_size}
        self.probe = UATRPO("MlpPolicy", self.env, **sizes, seed=seed, device="cpu")
        self.probe.policy = model.policy
        _, self.callback = self.probe._setup_learn(10**9)

    def rollout(self) -> PolicyEstimates:
        probe = self.probe
        probe.collect_rollouts(self.env, self.callback, probe.rollout_buffer, probe.n_steps)
        return policy_estimates(probe)


class Candidates(BaseCallback):
    """The variants as models that share the trained policy and its rollouts. Each has its own sketch."""

    def __init__(self, variants: dict[str, tuple[str, dict[str, Any]]], env: Any, seed: int) -> None:
        super().__init__()
        self.models = {
            name: CLASSES[cls]("MlpPolicy", env, seed=seed, device="cpu", **settings)
            for name, (cls, settings) in variants.items()
        }
        self.watching = False

    def share(self, source: TrustRegionAlgorithm) -> None:
        for model in self.models.values():
            model.policy, model.rollout_buffer = source.policy, source.rollout_buffer

    def sketched(self) -> dict[str, UATRPO]:
        return {name: model for name, model in self.models.items() if isinstance(model, UATRPO)}

    def leaders(self) -> dict[tuple[Any, ...], UATRPO]:
        """One model for each kind of sketch: the averages do not depend on shrinkage, c or the solver."""
        return {
            (model.n_projections, model.ema_beta, model.sub_sampling_factor): model
            for model in reversed(self.sketched().values())
        }

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        # train() has not run yet: this is the policy that acted, and these are its steps
        if self.watching:
            assert isinstance(self.model, TrustRegionAlgorithm)
            self.share(self.model)
            for model in self.leaders().values():
                model._find_direction(policy_estimates(model))

    def settle(self) -> dict[str, dict[str, th.Tensor]]:
        """Copy each leader's averages to the sketches that share them, and return all sketches' states by variant."""
        leaders = self.leaders()
        for model in self.sketched().values():
            leader = leaders[model.n_projections, model.ema_beta, model.sub_sampling_factor]
            if model is not leader:
                model.sketch.load_state_dict(leader.sketch.state_dict())
        return {
            name: {key: value.clone() for key, value in model.sketch.state_dict().items()}
            for name, model in self.sketched().items()
        }


def score(gradient: th.Tensor, fisher: Callable[[th.Tensor], float], v: th.Tensor) -> tuple[float, float]:
    """g*'v/√(v'F*v), and v'F*v."""
    curvature = fisher(v)
    return gradient.dot(v).item() / math.sqrt(curvature), curvature


def measure_checkpoint(
    candidates: Candidates, collector: Collector, n_reference: int, n_tests: int
) -> dict[str, dict[str, list[float]]]:
    """Scores and KL ratios of every variant on each of the test rollouts."""
    gradients: list[th.Tensor] = []
    references: list[SampleEstimates] = []
    for _ in range(n_reference):
        estimates = collector.rollout()
        gradients.append(estimates.gradient)
        if len(references) < math.ceil(n_reference / FISHER_SHARE):
            estimates.whole.quadratic_forms(estimates.gradient)  # builds the graph before the buffer is overwritten
            references.append(estimates.whole)
    gradient = th.stack(gradients).mean(dim=0)

    def fisher(v: th.Tensor) -> float:
        return sum(each.quadratic_forms(v)[0] for each in references) / len(references)

    states = candidates.settle()
    candidates.share(collector.probe)
    rows: dict[str, dict[str, list[float]]] = {}

    def add(name: str, **values: float) -> None:
        for key, value in values.items():
            rows.setdefault(name, {}).setdefault(key, []).append(float(f"{value:.6g}"))

    for i in range(n_tests):
        rollout = collector.rollout()
        quality, _ = score(gradient, fisher, rollout.gradient)
        add(GRADIENT, score=quality)
        for name, model in candidates.models.items():
            if isinstance(model, UATRPO):
                model.sketch.load_state_dict(states[name])
            model.subsample_generator = np.random.default_rng(i)
            estimates = policy_estimates(model)
            direction = model._find_direction(estimates)
            length = model._find_length(direction, estimates)
            quality, curvature = score(gradient, fisher, direction.vector)
            add(name, score=quality, kl_ratio=0.5 * length.eta**2 * curvature / length.kl_estimated)
    return rows


def measure(env_id: str, seed: int, settings: dict[str, Any], path: Path) -> None:
    """Train once and measure at each checkpoint, for one task and seed."""
    warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)
    th.set_num_threads(1)
    env, n_steps, updates = normalized(env_id, seed=seed), settings["n_steps"], settings["updates"]
    batch_size = next(size for size in BATCH_SIZES if n_steps % size == 0)
    model = UATRPO("MlpPolicy", env, n_steps=n_steps, batch_size=batch_size, seed=seed, device="cpu")
    candidates = Candidates(settings["variants"], env, seed)
    checkpoints = {}
    for previous, update in zip([0, *updates], updates, strict=False):
        for steps, candidates.watching in (
            (max(0, update - previous - UPDATES_TO_FILL_THE_SKETCH), False),
            (min(update - previous, UPDATES_TO_FILL_THE_SKETCH), True),
        ):
            if steps > 0:
                model.learn(steps * model.n_steps, callback=candidates, reset_num_timesteps=False)
        collector = Collector(model, env_id, seed=10_000 + 1000 * seed + update)
        checkpoints[str(update)] = measure_checkpoint(candidates, collector, *settings["rollouts"])
        print(f"{env_id}, seed {seed}: update {update} measured", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"env": env_id, "seed": seed, "versions": about(), "checkpoints": checkpoints}
    path.write_text(json.dumps(record | settings) + "\n")


def other_setting(path: Path, settings: dict[str, Any]) -> str:
    """:return: the name of a setting that a file was measured with another value of; empty if there is none"""
    record = json.loads(path.read_text())
    checkpoints = record["checkpoints"]
    names = [name for name in next(iter(checkpoints.values())) if name != GRADIENT]
    # files of earlier versions do not say the others
    measured = {"n_steps": 1000, "variants": {name: settings["variants"].get(name) for name in names}}
    measured = settings | measured | record | {"updates": list(map(int, checkpoints))}
    # JSON has lists for tuples
    wanted = json.loads(json.dumps(settings))
    return next((name for name in wanted if json.loads(json.dumps(measured[name])) != wanted[name]), "")


def read(paths: list[Path]) -> pd.DataFrame:
    """One row for each task, seed, checkpoint and variant: means over the test rollouts."""
    rows = []
    for record in (json.loads(path.read_text()) for path in paths):
        for update, variants in record["checkpoints"].items():
            place = {"env": record["env"], "seed": record["seed"], "update": int(update)}
            for name, values in variants.items():
                means = {key: float(pd.Series(numbers).mean()) for key, numbers in values.items()}
                rows.append(place | {"variant": name} | means)
    return pd.DataFrame(rows)


def compare(frame: pd.DataFrame, reference: str = REFERENCE) -> pd.DataFrame:
    """
    Each variant's score divided by the reference's, and the paired difference with a 95% interval.

    Scores are divided by the reference's mean over the checkpoints of a task, so that tasks can be averaged; intervals
    are Student's, over checkpoints of all tasks and seeds.
    """
    scores = frame.pivot_table(index=["env", "seed", "update"], columns="variant", values="score", sort=False)
    relative = scores.div(scores[reference].groupby(level="env").transform("mean"), axis=0)
    differences = relative.sub(relative[reference], axis=0)
    table = relative.groupby(level="env", sort=False).mean().T
    table["all"] = relative.groupby(level="env").mean().mean()
    intervals = {
        name: ttest_1samp(values, 0.0).confidence_interval() if name != reference else (0.0, 0.0)
        for name, values in differences.items()
    }
    table["difference"] = differences.mean()
    table["low"] = [intervals[name][0] for name in table.index]
    table["high"] = [intervals[name][1] for name in table.index]
    table["KL ratio"] = frame.groupby("variant")["kl_ratio"].median()
    return table.loc[frame["variant"].unique()]


def report(frame: pd.DataFrame) -> str:
    """:return: the page in Markdown, from what ``read`` returns"""

    def rounded(value: float) -> str:
        return f"{value:.2f}" if math.isfinite(value) else ""

    table = compare(frame)
    tasks = sorted(frame["env"].unique())
    rows = [
        {"estimator": name, **{task: rounded(row[task]) for task in tasks}}
        | {"difference": rounded(row["difference"]), "95% interval": f"{row['low']:.2f} to {row['high']:.2f}"}
        | {"KL ratio": rounded(row["KL ratio"])}
        for name, row in table.iterrows()
    ]
    parts = [
        "# How good are directions?",
        "`python benchmarks/measure_direction_quality.py` writes this page; its docstring explains the measurement. "
        f"{len(frame) // len(table)} policies. Scores are in units of that of {REFERENCE}; the KL ratio is a median.",
        markdown(rows),
    ]
    pairs = [(name, f"{name}, c = 0") for name in table.index if f"{name}, c = 0" in table.index]
    without = {name: compare(frame, name).loc[other] for name, other in pairs}
    if without:
        rows = [
            {"estimator": name, "difference without the uncertainty term": rounded(row["difference"])}
            | {"95% interval": f"{row['low']:.2f} to {row['high']:.2f}"}
            for name, row in without.items()
        ]
        parts += ["In units of the estimator's own score:", markdown(rows)]
    return "\n\n".join(parts) + "\n"


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = parser_of(__doc__)
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21, 22])
    parser.add_argument("--n-steps", type=int, default=1000, help="steps per update")
    parser.add_argument("--updates", nargs="+", type=int, default=[30, 75, 150, 225, 300], help="in ascending order")
    parser.add_argument("--reference-rollouts", type=int, default=48)
    parser.add_argument("--test-rollouts", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="names of variants")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--folder", type=Path, default=Path("runs/direction_quality"))
    options = parser.parse_args(args)
    for env_id in options.env:
        if env_id not in gym.registry:
            parser.error(f"--env: Gymnasium knows no environment {env_id!r}")
    if sorted(set(options.updates)) != options.updates or options.updates[0] < 1:
        parser.error(f"--updates must ascend from at least 1, but they are {options.updates}")
    refuse_below(parser, options, n_steps=2, reference_rollouts=1, test_rollouts=1, jobs=1)
    updates = [max(1, round(update * 1000 / options.n_steps)) for update in options.updates]
    n_reference = math.ceil(options.reference_rollouts * 1000 / options.n_steps)
    if len(set(updates)) < len(updates):
        parser.error(f"--updates are too close together for --n-steps {options.n_steps}: {options.updates}")
    settings = {"n_steps": options.n_steps, "updates": updates, "rollouts": [n_reference, options.test_rollouts]}
    settings["variants"] = {name: VARIANTS[name] for name in VARIANTS if name in {REFERENCE, *options.only}}
    paths = {(env, seed): options.folder / f"{env}_{seed}.json" for seed in options.seeds for env in options.env}
    for path in paths.values():
        if path.exists() and (name := other_setting(path, settings)):
            parser.error(f"{path} was measured with other {name}: choose another --folder")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        missing = [(*run, settings, path) for run, path in paths.items() if not path.exists()]
        list(pool.map(measure, *zip(*missing, strict=True)))
    frame = read(list(paths.values()))
    table = compare(frame)
    print(table.to_string(float_format=lambda value: f"{value:.2f}"))
    (options.folder / "report.md").write_text(report(frame), encoding="utf-8")
    print(f"written: {options.folder / 'report.md'}")
    return table


if __name__ == "__main__":
    main()
