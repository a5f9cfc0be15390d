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
other updates or variants is refused.

``--variant`` adds a variant or replaces one, for example ``--variant "half=UATRPO:shrinkage=0.5,n_projections=100"``.
``--only`` leaves out all others but the one that the others are compared with, ``--reference``.

``report.md`` in the folder has the table, and how each method's score changes without the uncertainty term (c = 0).
"""

import argparse
import ast
import json
import math
import platform
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pandas as pd
import stable_baselines3
import torch as th
from judge_study import markdown
from scipy.stats import ttest_1samp
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import sb3_uatrpo
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
    with actor.differentiable_policy():
        actor.find_params(batch)
        return model._estimate(actor, batch, count_trajectories(model.rollout_buffer))


class Collector:
    """Rollouts of a frozen policy, in separate environments."""

    def __init__(self, model: TrustRegionAlgorithm, env_id: str, seed: int) -> None:
        training = model.get_vec_normalize_env()
        assert training is not None
        self.env = VecNormalize(make_vec_env(env_id, seed=seed), norm_reward=False, gamma=model.gamma)
        self.env.obs_rms, self.env.training = training.obs_rms, False
        self.probe = UATRPO(
            "MlpPolicy", self.env, n_steps=model.n_steps, batch_size=model.batch_size, seed=seed, device="cpu"
        )
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


def measure(
    env_id: str,
    seed: int,
    n_steps: int,
    updates: list[int],
    n_reference: int,
    n_tests: int,
    variants: dict[str, tuple[str, dict[str, Any]]],
    path: Path,
) -> None:
    """Train once and measure at each checkpoint, for one task and seed."""
    warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)
    th.set_num_threads(1)
    env = VecNormalize(make_vec_env(env_id, seed=seed), norm_reward=False, gamma=0.995)
    batch_size = next(size for size in BATCH_SIZES if n_steps % size == 0)
    model = UATRPO("MlpPolicy", env, n_steps=n_steps, batch_size=batch_size, seed=seed, device="cpu")
    candidates = Candidates(variants, env, seed)
    checkpoints = {}
    for previous, update in zip([0, *updates], updates, strict=False):
        for steps, candidates.watching in (
            (max(0, update - previous - UPDATES_TO_FILL_THE_SKETCH), False),
            (min(update - previous, UPDATES_TO_FILL_THE_SKETCH), True),
        ):
            if steps > 0:
                model.learn(steps * model.n_steps, callback=candidates, reset_num_timesteps=False)
        collector = Collector(model, env_id, seed=10_000 + 1000 * seed + update)
        checkpoints[str(update)] = measure_checkpoint(candidates, collector, n_reference, n_tests)
        print(f"{env_id}, seed {seed}: update {update} measured", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **{module.__name__: module.__version__ for module in (sb3_uatrpo, stable_baselines3, gym, mujoco, th)},
    }
    record = {"env": env_id, "seed": seed, "n_steps": n_steps, "versions": versions, "checkpoints": checkpoints}
    record |= {"rollouts": [n_reference, n_tests], "variants": variants}
    path.write_text(json.dumps(record) + "\n")


def differs(
    path: Path,
    n_steps: int,
    updates: list[int],
    variants: Mapping[str, tuple[str, dict[str, Any]]],
    rollouts: tuple[int, int],
) -> str:
    """How a file's options differ from these, as far as the file shows them; empty if they do not."""
    record = json.loads(path.read_text())
    checkpoints = record["checkpoints"]
    # files of earlier versions do not say
    if (measured_with := record.get("n_steps", 1000)) != n_steps:
        return f"--n-steps: {measured_with}"
    if list(checkpoints) != list(map(str, updates)):
        return f"--updates: {' '.join(checkpoints)}"
    measured = set(next(iter(checkpoints.values())))
    different = measured ^ {GRADIENT, *variants}
    if "rollouts" in record:
        # JSON has lists for tuples
        given = json.loads(json.dumps(variants))
        different |= {name for name in given if record["variants"].get(name) != given[name]}
    if different:
        return f"variants: {', '.join(sorted(different))}"
    if record.get("rollouts", list(rollouts)) != list(rollouts):
        return f"numbers of rollouts: {record['rollouts'][0]} for the reference, {record['rollouts'][1]} for tests"
    return ""


def read(paths: list[Path]) -> pd.DataFrame:
    """One row for each task, seed, checkpoint and variant: means over the test rollouts."""
    rows = []
    for path in paths:
        record = json.loads(path.read_text())
        for update, variants in record["checkpoints"].items():
            for name, values in variants.items():
                means = {key: float(pd.Series(numbers).mean()) for key, numbers in values.items()}
                place = {"env": record["env"], "seed": record["seed"], "update": int(update)}
                rows.append({**place, "variant": name, **means})
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


def report(frame: pd.DataFrame, reference: str = REFERENCE) -> str:
    """
    :param frame: from ``read``
    :param reference: the variant that the others are compared with
    :return: the page in Markdown
    """

    def rounded(value: float) -> str:
        return f"{value:.2f}" if math.isfinite(value) else ""

    table = compare(frame, reference)
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
        f"{len(frame) // len(table)} policies. Scores are in units of that of {reference}; the KL ratio is a median.",
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


def parse_variant(text: str) -> tuple[str, tuple[str, dict[str, Any]]]:
    name, separator, rest = text.partition("=")
    cls, _, settings = rest.partition(":")
    if not separator or cls not in CLASSES:
        raise argparse.ArgumentTypeError(f"a variant is written NAME=UATRPO:shrinkage=0.5,…, but it is {text!r}")
    try:
        pairs = [pair.split("=") for pair in settings.split(",") if pair]
        return name, (cls, {key.strip(): ast.literal_eval(value) for key, value in pairs})
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"the settings of {text!r} are not name=value: {error}") from error


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21, 22])
    parser.add_argument("--n-steps", type=int, default=1000, help="steps per update")
    parser.add_argument("--updates", nargs="+", type=int, default=[30, 75, 150, 225, 300], help="in ascending order")
    parser.add_argument("--reference-rollouts", type=int, default=48)
    parser.add_argument("--test-rollouts", type=int, default=8)
    parser.add_argument("--variant", nargs="*", type=parse_variant, default=[], help="NAME=CLASS:argument=value,…")
    parser.add_argument("--only", nargs="+", help="names of variants")
    parser.add_argument("--reference", default=REFERENCE, help="name of a variant")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--folder", type=Path, default=Path("runs/direction_quality"))
    options = parser.parse_args(args)
    for env_id in options.env:
        if env_id not in gym.registry:
            parser.error(f"--env: Gymnasium knows no environment {env_id!r}")
    if sorted(set(options.updates)) != options.updates or options.updates[0] < 1:
        parser.error(f"--updates must ascend from at least 1, but they are {options.updates}")
    for name, low in (("n_steps", 2), ("reference_rollouts", 1), ("test_rollouts", 1), ("jobs", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, but it is {getattr(options, name)}")
    updates = [max(1, round(update * 1000 / options.n_steps)) for update in options.updates]
    n_reference = math.ceil(options.reference_rollouts * 1000 / options.n_steps)
    if len(set(updates)) < len(updates):
        parser.error(f"--updates are too close together for --n-steps {options.n_steps}: {options.updates}")
    variants = {**VARIANTS, **dict(options.variant)}
    for option, names in (("--only", options.only or ()), ("--reference", [options.reference])):
        if unknown := set(names) - set(variants):
            parser.error(f"{option}: there is no variant {sorted(unknown)[0]!r}")
    variants = {name: variants[name] for name in variants if name in {options.reference, *(options.only or variants)}}
    paths = {(env, seed): options.folder / f"{env}_{seed}.json" for seed in options.seeds for env in options.env}
    for path in paths.values():
        if path.exists() and (
            difference := differs(path, options.n_steps, updates, variants, (n_reference, options.test_rollouts))
        ):
            parser.error(f"{path} was measured with other {difference}: choose another --folder")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(
                measure,
                env_id,
                seed,
                options.n_steps,
                updates,
                n_reference,
                options.test_rollouts,
                variants,
                path,
            )
            for (env_id, seed), path in paths.items()
            if not path.exists()
        ]
        for future in futures:
            future.result()
    frame = read(list(paths.values()))
    table = compare(frame, options.reference)
    print(table.to_string(float_format=lambda value: f"{value:.2f}"))
    (options.folder / "report.md").write_text(report(frame, options.reference), encoding="utf-8")
    print(f"written: {options.folder / 'report.md'}")
    return table


if __name__ == "__main__":
    main()
