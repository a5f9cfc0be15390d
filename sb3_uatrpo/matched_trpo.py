"""
MatchedTRPO: how TRPO finds a direction and its length. The update is otherwise that of UATRPO.

RL Zoo's name for the class is ``trpo_matched``, so that it stands beside ``trpo`` in tables and folders.
"""

from functools import partial
from typing import Any, ClassVar

import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_uatrpo.arguments import Rule, check_integer, check_rate, check_real, explain_unknown
from sb3_uatrpo.core.conjugate_gradient import conjugate_gradient
from sb3_uatrpo.core.step_length import step_length
from sb3_uatrpo.trust_region_algorithm import Direction, Length, PolicyEstimates, TrustRegionAlgorithm


class MatchedTRPO(TrustRegionAlgorithm):
    r"""
    Trust Region Policy Optimization (TRPO) as a matched control for UATRPO

    Batch, Fisher matrix, subsampling, line search, critic, logging and adversarial noise are UATRPO's, so that the two
    methods differ only in what the paper changes. The direction and its length are those of TRPO as it is usually
    written:

    .. math:: (\hat F+\text{damping}\cdot I)\,v=\hat g \text{ by conjugate gradients}, \qquad
        \eta=\sqrt{2\delta_{KL}\,/\,v'(\hat F+\text{damping}\cdot I)v}

    with the KL divergence *summed* over action dimensions. For Box and MultiBinary actions, sb3-contrib's TRPO takes
    the mean over them: with A action dimensions, the same δ allows A times the KL divergence there.

    Paper: Schulman et al., *Trust Region Policy Optimization*, ICML 2015, https://arxiv.org/abs/1502.05477; the
    defaults are those of the UA-TRPO paper's experiments (its appendix).

    All other arguments are those of :class:`UATRPO`:

    :param target_kl: δ_KL > 0, size of the trust region in nats
    :param cg_max_steps: maximum number of iterations of conjugate gradients
    :param cg_damping: multiple of the identity added to F̂, at least 0
    :param sub_sampling_factor: F̂ is estimated from one step, drawn at random, of each ``sub_sampling_factor``
        consecutive steps of the batch
    :param line_search_kl_factor: the line search accepts a KL divergence up to this many times ``target_kl``
    :raises ValueError: if a number, flag or choice is out of range, of the wrong type, NaN or infinite
    """

    _OWN_ARGUMENTS = frozenset({"cg_max_steps", "cg_damping"})
    _RULES: ClassVar[dict[str, Rule]] = TrustRegionAlgorithm._RULES | {
        "target_kl": partial(check_real, low=0.0),
        "cg_max_steps": partial(check_integer, low=1),
        "cg_damping": check_rate,
    }

    @explain_unknown
    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        n_steps: int = 1000,
        batch_size: int = 50,
        gamma: float = 0.995,
        gae_lambda: float = 0.97,
        target_kl: float = 0.01,
        cg_max_steps: int = 20,
        cg_damping: float = 0.1,
        sub_sampling_factor: int = 10,
        n_reused_rollouts: int = 0,
        normalize_advantage: bool = True,
        adversarial_noise: float = 0.0,
        line_search_shrinking_factor: float = 0.8,
        line_search_max_iter: int = 10,
        line_search_kl_factor: float = 1.5,
        n_critic_updates: int = 5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        fast_rollouts: bool = True,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            gamma=gamma,
            gae_lambda=gae_lambda,
            sub_sampling_factor=sub_sampling_factor,
            n_reused_rollouts=n_reused_rollouts,
            normalize_advantage=normalize_advantage,
            adversarial_noise=adversarial_noise,
            line_search_shrinking_factor=line_search_shrinking_factor,
            line_search_max_iter=line_search_max_iter,
            line_search_kl_factor=line_search_kl_factor,
            n_critic_updates=n_critic_updates,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            fast_rollouts=fast_rollouts,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )
        self.target_kl = target_kl
        self.cg_max_steps = cg_max_steps
        self.cg_damping = cg_damping
        if _init_setup_model:
            self._setup_model()

    def _find_direction(self, estimates: PolicyEstimates) -> Direction:
        def damped(vector: th.Tensor) -> th.Tensor:
            return estimates.subsample.fisher_product(vector) + self.cg_damping * vector

        return Direction(conjugate_gradient(damped, estimates.gradient, self.cg_max_steps))

    def _find_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        v = direction.vector
        fisher, _ = estimates.subsample.quadratic_forms(v)
        damping = self.cg_damping * v.double().dot(v.double()).item()
        return Length(step_length(self.target_kl, fisher + damping), self.target_kl)
