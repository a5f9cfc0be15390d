"""
Search spaces of RL Zoo's ``-optimize``: the recommended UATRPO, the paper's, and MatchedTRPO.

RL Zoo calls a sampler with optuna's trial, the number of dimensions of continuous actions, or 0, the number of
environments, and arguments that are not used here. It returns arguments of a constructor.
"""

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from sb3_uatrpo.presets import RECOMMENDED
from sb3_uatrpo.uatrpo import UATRPO

if TYPE_CHECKING:
    import optuna

# Every minibatch size divides every rollout length, and so n_steps * n_envs for any number of environments
N_STEPS = (250, 500, 1000, 2000, 4000)
BATCH_SIZES = (25, 50, 125, 250)
NET_ARCHS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
ACTIVATION_FNS = {"tanh": nn.Tanh, "relu": nn.ReLU}
# Small values do not behave like 0, so there is no continuous range to sample from
SHRINKAGES = (0.5, 0.75, 0.9, 0.97)


def _recommended_trial() -> dict[str, Any]:
    """``sb3_uatrpo.RECOMMENDED``, and the constructor's defaults, as a trial samples them."""
    arguments = {name: param.default for name, param in inspect.signature(UATRPO).parameters.items()} | RECOMMENDED
    return {
        "one_minus_gamma": round(1.0 - arguments["gamma"], 10),
        "one_minus_gae_lambda": round(1.0 - arguments["gae_lambda"], 10),
        # the policy's defaults
        "net_arch": "small",
        "activation_fn": "tanh",
        "log_std_init": float(arguments["policy_kwargs"]["log_std_init"]),
        **{
            name: arguments[name]
            for name in (
                "n_steps", "batch_size", "learning_rate", "n_critic_updates", "sub_sampling_factor", "uncertainty_coef",
                "n_projections", "ema_beta", "step_length_samples", "target_kl", "shrinkage",
            )
        },
    }  # fmt: skip


RECOMMENDED_TRIAL = _recommended_trial()


def convert_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """:return: arguments of the constructor, from the values that a trial has sampled"""
    params = dict(sampled_params)
    net_arch = NET_ARCHS[params.pop("net_arch")]
    return {
        "gamma": 1.0 - params.pop("one_minus_gamma"),
        "gae_lambda": 1.0 - params.pop("one_minus_gae_lambda"),
        "policy_kwargs": {
            "net_arch": {"pi": net_arch, "vf": net_arch},
            "activation_fn": ACTIVATION_FNS[params.pop("activation_fn")],
            **{name: params.pop(name) for name in ("log_std_init",) if name in params},
        },
        **params,
    }


def _sample_shared_params(trial: "optuna.Trial", n_actions: int) -> dict[str, Any]:
    sampled: dict[str, Any] = {
        "n_steps": trial.suggest_categorical("n_steps", N_STEPS),
        "batch_size": trial.suggest_categorical("batch_size", BATCH_SIZES),
        "one_minus_gamma": trial.suggest_float("one_minus_gamma", 0.0001, 0.03, log=True),
        "one_minus_gae_lambda": trial.suggest_float("one_minus_gae_lambda", 0.0001, 0.1, log=True),
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "n_critic_updates": trial.suggest_int("n_critic_updates", 1, 20),
        "sub_sampling_factor": trial.suggest_categorical("sub_sampling_factor", (1, 2, 5, 10)),
        "net_arch": trial.suggest_categorical("net_arch", tuple(NET_ARCHS)),
        "activation_fn": trial.suggest_categorical("activation_fn", tuple(ACTIVATION_FNS)),
    }
    if n_actions > 0:
        sampled["log_std_init"] = trial.suggest_float("log_std_init", -2.0, 0.0)
    # shown in the report beside the sampled values
    trial.set_user_attr("gamma", 1.0 - sampled["one_minus_gamma"])
    trial.set_user_attr("gae_lambda", 1.0 - sampled["one_minus_gae_lambda"])
    return sampled


def _sample_trust_region_params(trial: "optuna.Trial") -> dict[str, Any]:
    return {
        "uncertainty_coef": trial.suggest_float("uncertainty_coef", 1e-5, 1e-2, log=True),
        "n_projections": trial.suggest_categorical("n_projections", (50, 100, 200, 400)),
        "ema_beta": trial.suggest_categorical("ema_beta", (0.0, 0.5, 0.9, 0.95)),
        "step_length_samples": trial.suggest_categorical("step_length_samples", ("subsample", "batch")),
    }


def _sample_uatrpo_params(trial: "optuna.Trial", n_actions: int, n_envs: int, _: Any) -> dict[str, Any]:
    """
    Some shrinkage, and TRPO's step length. The second trial of a search is ``RECOMMENDED``, with the largest of
    ``N_STEPS`` that makes batches no larger than from one environment, or with the smallest if there is none.
    """
    if trial.number == 0:
        # RL Zoo has no place for this before the first trial
        n_steps = max(n for n in N_STEPS if n * n_envs <= RECOMMENDED_TRIAL["n_steps"] or n == min(N_STEPS))
        trial.study.enqueue_trial({**RECOMMENDED_TRIAL, "n_steps": n_steps}, skip_if_exists=True)
    sampled = _sample_shared_params(trial, n_actions) | _sample_trust_region_params(trial)
    sampled["target_kl"] = trial.suggest_float("target_kl", 0.001, 0.1, log=True)
    sampled["shrinkage"] = trial.suggest_categorical("shrinkage", SHRINKAGES)
    return convert_params(sampled)


def _sample_uatrpo_paper_params(trial: "optuna.Trial", n_actions: int, n_envs: int, _: Any) -> dict[str, Any]:
    """The step length is set by ``trust_region_delta``, as in the paper. Every sample fits any ``n_envs``."""
    sampled = _sample_shared_params(trial, n_actions) | _sample_trust_region_params(trial)
    sampled["trust_region_delta"] = trial.suggest_float("trust_region_delta", 0.005, 0.2, log=True)
    sampled["shrinkage"] = trial.suggest_categorical("shrinkage", (0.0, *SHRINKAGES))
    return convert_params(sampled)


def _sample_matched_trpo_params(trial: "optuna.Trial", n_actions: int, n_envs: int, _: Any) -> dict[str, Any]:
    """Every sample fits any ``n_envs``."""
    sampled = _sample_shared_params(trial, n_actions)
    sampled["target_kl"] = trial.suggest_float("target_kl", 0.001, 0.1, log=True)
    sampled["cg_max_steps"] = trial.suggest_int("cg_max_steps", 5, 30)
    sampled["cg_damping"] = trial.suggest_float("cg_damping", 1e-3, 0.5, log=True)
    return convert_params(sampled)


#: for each name in RL Zoo
SAMPLERS = {
    "uatrpo": _sample_uatrpo_params,
    "uatrpo_small_batches": _sample_uatrpo_params,
    "uatrpo_paper": _sample_uatrpo_paper_params,
    "trpo_matched": _sample_matched_trpo_params,
}
