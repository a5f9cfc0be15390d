"""The Stable-Baselines3 side of the trust region methods: arguments, the order of an update, and logging."""

import inspect
import io
import math
import pathlib
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.utils import explained_variance, update_learning_rate
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.actor_update import Direction, Length, PolicyEstimates, diagnose_line_search, diagnose_step
from sb3_uatrpo.arguments import RULES, Rule, check_class, check_optional, check_rate
from sb3_uatrpo.batch import (
    Batch,
    NonFiniteRolloutError,
    check_finite,
    count_trajectories,
    evaluate_actions,
    rollout_batch,
)
from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.checkpoints import refuse_other_algorithms
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult, backtracking_line_search
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.plain_mlp import one_thread_if_small
from sb3_uatrpo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.policy_check import check_policy
from sb3_uatrpo.rollout_pool import RolloutPool, check_buffer

#: Keeps the random numbers of the subsample apart from those of Ω
SUBSAMPLE = 1
#: So many updates in a row that hardly moved the policy give a warning
STUCK = 10

SelfTrustRegionAlgorithm = TypeVar("SelfTrustRegionAlgorithm", bound="TrustRegionAlgorithm")


class TrustRegionAlgorithm(OnPolicyAlgorithm):
    """
    Base class of this package's trust region methods. ``UATRPO`` and ``MatchedTRPO`` document the arguments.

    The order of one update: rollout buffer → batch → estimates of ĝ, F̂ and Σ̂ → a direction and its length (the
    subclass) → line search → critic → log.
    """

    #: whether a saved model contains a sketch
    _has_sketch: ClassVar[bool] = False
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    batch_size: int
    line_search_shrinking_factor: float
    line_search_max_iter: int
    line_search_kl_factor: float
    n_critic_updates: int
    normalize_advantage: bool
    sub_sampling_factor: int
    n_reused_rollouts: int
    adversarial_noise: float
    fast_rollouts: bool
    #: whether the last call of ``learn`` was on observations that VecNormalize had normalised
    _learned_normalized = False

    #: for each argument, what takes its name and value, and returns the value or raises a ValueError
    _RULES: ClassVar[dict[str, Rule]] = RULES

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        *,
        verbose: int,
        _init_setup_model: bool,
        **arguments: Any,
    ) -> None:
        """The other arguments are those of ``OnPolicyAlgorithm`` and those that become attributes of the same name."""
        check_class("policy", policy, ActorCriticPolicy, tuple(self.policy_aliases))
        # the user's own dict, or a preset's, stays as it is
        policy_kwargs = check_optional("policy_kwargs", arguments["policy_kwargs"], Mapping, "a dict")
        arguments["policy_kwargs"] = None if policy_kwargs is None else dict(policy_kwargs)
        theirs = arguments.keys() & inspect.signature(OnPolicyAlgorithm.__init__).parameters.keys()
        super().__init__(
            policy,
            env,
            # No entropy bonus; the value function has its own loss; the trust region bounds the step
            ent_coef=0.0,
            vf_coef=0.0,
            max_grad_norm=0.0,
            verbose=self._RULES["verbose"]("verbose", verbose),
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
            **{name: arguments.pop(name) for name in theirs},
        )
        for name, value in arguments.items():
            setattr(self, name, value)
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        # Here and not in the constructor, so that arguments changed by load() are checked too
        self._check_arguments()
        self._warn_of_truncated_minibatches()
        if self._has_one_action:
            warnings.warn(
                "The action space has one action: nothing can be chosen, and only the critic learns.", stacklevel=3
            )
        # those of files that Stable-Baselines3's classes are in, too
        if self.policy_class is ActorCriticPolicy:
            self.policy_class = MlpPolicy
        if self.rollout_buffer_class in (None, RolloutBuffer) and not isinstance(self.observation_space, spaces.Dict):
            self.rollout_buffer_class = LeanRolloutBuffer
        super()._setup_model()
        self._logged: set[str] = set()
        self._n_stuck, self._warned = 0, False
        # load() restores it; the constructor makes it
        if "subsample_generator" not in vars(self):
            self.subsample_generator = np.random.default_rng(self._generator_seed(self.seed, SUBSAMPLE))
        self.rollout_pool = RolloutPool(self.n_reused_rollouts)
        if self.n_reused_rollouts > 0:
            check_buffer(self.rollout_buffer)
        #: names of the parameters that some batch has used
        self._acting_params: list[str] = vars(self).get("_acting_params", [])
        self._n_actor_params, self._first_error = check_policy(self.policy)

    @property
    def _has_one_action(self) -> bool:
        return isinstance(self.action_space, spaces.Discrete) and self.action_space.n == 1

    def _excluded_save_params(self) -> list[str]:
        # an exception may hold anything; rollouts are a state dict
        return [*super()._excluded_save_params(), "_first_error", "rollout_pool"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        return [*state_dicts, "rollout_pool"] if self.n_reused_rollouts > 0 else state_dicts, variables

    def set_parameters(
        self, load_path_or_dict: str | dict[str, Any], exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """As Stable-Baselines3's. Old rollouts may be missing, and are left out where none are reused."""
        given = load_path_or_dict
        params: dict[str, Any] = (
            dict(given) if isinstance(given, dict) else load_from_zip_file(given, device=device, load_data=False)[1]
        )
        rollouts = params.pop("rollout_pool", {})
        if self.n_reused_rollouts > 0:
            params["rollout_pool"] = rollouts
        super().set_parameters(params, exact_match, device)

    # by default, it would look for a policy of another name
    def _maybe_recommend_cpu(self, mlp_class_name: str = "MlpPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed everything random, as Stable-Baselines3 does, and the generators of the subsample and of Ω.

        An Ω that has been drawn already stays.

        :param seed: from 0 to 2³²-1; ``None`` changes nothing
        """
        super().set_random_seed(seed)
        # The constructor and load() call this before there is a policy: load() keeps the generators of the file
        if seed is not None and "policy" in vars(self):
            self._seed_generators(seed)

    def _seed_generators(self, seed: int) -> None:
        self.subsample_generator = np.random.default_rng(self._generator_seed(seed, SUBSAMPLE))

    @staticmethod
    def _generator_seed(seed: int | None, *purpose: int) -> int:
        """63 bits that seed a generator of the algorithm's own. Each purpose gets others."""
        if seed is None:
            # a draw from the global generator, as for everything else without a seed
            return int(th.randint(2**63 - 1, ()))
        # not the seed itself: the generator would repeat the numbers that initialised the policy
        return int(np.random.SeedSequence(seed, spawn_key=purpose).generate_state(1, np.uint64)[0]) >> 1

    @classmethod
    def load(
        cls: type[SelfTrustRegionAlgorithm],
        path: str | pathlib.Path | io.BufferedIOBase,
        *args: Any,
        **kwargs: Any,
    ) -> SelfTrustRegionAlgorithm:
        """
        Load a model from a zip-file. The arguments are Stable-Baselines3's.

        :raises ValueError: if another algorithm saved the file, or an argument has a bad value
        """
        refuse_other_algorithms(cls.__name__, cls._has_sketch, path)
        model = super().load(path, *args, **kwargs)
        if model.env is not None:
            model._warn_of_raw_observations()
        return model

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Replace the environment, as Stable-Baselines3 does; the arguments are its own."""
        super().set_env(env, force_reset)
        self.rollout_pool.clear()
        assert self.env is not None
        self._vec_normalize_env = unwrap_vec_normalize(self.env)
        self._warn_of_raw_observations()

    @property
    def _is_normalized(self) -> bool:
        return self._vec_normalize_env is not None and self._vec_normalize_env.norm_obs

    def _warn_of_raw_observations(self) -> None:
        if self._learned_normalized and not self._is_normalized:
            warnings.warn(
                "The model was trained with VecNormalize's observations, and this environment has none: load the "
                "statistics with VecNormalize.load(path, env), or returns will be low.",
                stacklevel=3,
            )

    def _check_arguments(self) -> None:
        """
        Check the arguments, and make NumPy's numbers Python's.

        :raises ValueError: if a number, flag or choice is out of range, of the wrong type, NaN or infinite
        """
        # unlike the constructor, load() needs none: the file has this number
        if not hasattr(self, "n_envs"):
            raise ValueError("env must be an environment, or the name of a registered one, but it is None")
        for name, rule in self._RULES.items():
            # Stable-Baselines3 hides this one
            attribute = "_stats_window_size" if name == "stats_window_size" else name
            setattr(self, attribute, rule(name, getattr(self, attribute)))

        if isinstance(self.action_space, spaces.MultiDiscrete) and self.action_space.nvec.ndim > 1:
            raise ValueError(
                f"env: MultiDiscrete actions must have one dimension, but the action space is {self.action_space}"
            )
        n_total = self.n_steps * self.n_envs
        if n_total < 2:
            raise ValueError(
                "n_steps * n_envs must be at least 2, since the covariance of the gradient needs two samples, "
                f"but n_steps is {self.n_steps} and n_envs is {self.n_envs}"
            )

    def _warn_of_truncated_minibatches(self) -> None:
        n_total = self.n_steps * self.n_envs
        if n_total % self.batch_size > 0:
            warnings.warn(
                f"batch_size={self.batch_size} does not divide the rollout of n_steps * n_envs = {n_total} steps "
                f"(n_steps={self.n_steps} and n_envs={self.n_envs}): in each epoch of the critic the last minibatch is "
                f"truncated to {n_total % self.batch_size} steps. A factor of {n_total} is recommended.",
                stacklevel=2,
            )

    @abstractmethod
    def _find_direction(self, estimates: PolicyEstimates) -> Direction:
        """
        :param estimates: estimates of ĝ, F̂ and Σ̂ from the rollout
        :return: v; if v is zero or not finite, the update is refused
        """

    @abstractmethod
    def _find_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        """
        :param direction: the direction, finite and not zero
        :param estimates: estimates of ĝ, F̂ and Σ̂ from the rollout
        :return: η and the expected effect of the step
        """

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        """Fill the buffer with the experience of the current policy; arguments and result are Stable-Baselines3's."""
        policy: Any = self.policy
        with policy.numpy_rollout() if self.fast_rollouts and isinstance(policy, MlpPolicy) else nullcontext():
            return super().collect_rollouts(*args, **kwargs)

    def train(self) -> None:
        """
        Update the policy from the rollout buffer: one trust region step of the actor, then epochs of the critic.

        :raises NonFiniteRolloutError: if rewards, advantages or returns contain NaN or infinity, or if observations do
            and the features or outputs that the policy computes from them do, too. It is raised before anything
            changes, and is both a ``FloatingPointError`` and a ``ValueError``.
        :raises ValueError: if a learning rate schedule returned NaN or infinity, if the limit of UATRPO's sketch has
            become too small for a single projection, or if the policy acts by another distribution than the one that
            its ``evaluate_actions`` leaves in ``action_dist``. It is raised before the policy changes.
        :raises RuntimeError: if torch records no gradients, as within ``torch.no_grad()``
        """
        if not th.is_grad_enabled():
            raise RuntimeError("an update needs gradients, but torch.no_grad() or torch.inference_mode() is in effect")
        actor = Actor(self.policy)
        with one_thread_if_small(actor.mlp):
            self._update(actor)

    def _update(self, actor: Actor) -> None:
        batch = rollout_batch(self.rollout_buffer, self.normalize_advantage)
        with actor.differentiable_policy():
            self._check_observations(actor, batch)
            self._update_learning_rate(self.policy.optimizer)
            newest, known = batch, {"n_trajectories": float(count_trajectories(self.rollout_buffer))}
            if self.n_reused_rollouts > 0:
                check_buffer(self.rollout_buffer)
                batch, known = self.rollout_pool.join(
                    newest, self.rollout_buffer, self.policy, self.gae_lambda, self.normalize_advantage
                )
            self._find_params(actor, batch)
            found = self._update_actor(actor, batch, len(newest), known)
            # The critic's epochs do not change the actor's parameters, but may change batch-norm statistics of both
            stepped = actor.heads(batch) if any(True for _ in self.policy.buffers()) else None
        with actor.distribution_of_its_own():
            losses = fit_values(actor, self.rollout_buffer, self.batch_size, self.n_critic_updates)
        drift: dict[str, float] = {}
        if stepped is not None:
            with actor.differentiable_policy():
                drift["critic_kl"] = actor.head.kl(stepped, actor.heads(batch)).mean().item()
        self._show_distribution(newest)
        if self.n_reused_rollouts > 0:
            self.rollout_pool.add(self.rollout_buffer, self._last_obs, self._last_episode_starts)
        self._n_updates += 1
        self._log({**found, **self._diagnose_critic(losses), **drift})
        if actor.params and not self._has_one_action:
            self._warn_if_stuck(found["step_fraction"])

    def _show_distribution(self, batch: Batch) -> None:
        """
        Leave the new distribution in the policy's ``action_dist``, without a graph: that of the whole rollout if it can
        be computed when it is read, else that of as many timesteps as a minibatch has.
        """
        policy: Any = self.policy
        if isinstance(policy, MlpPolicy):
            policy.show_distribution(batch.observations)
            return
        steps = batch[: self.batch_size]
        training = policy.training
        policy.set_training_mode(False)
        # a policy may draw random numbers of its own
        with th.random.fork_rng([policy.device] if policy.device.type == "cuda" else []), th.no_grad():
            evaluate_actions(policy, steps.observations, steps.actions)
        policy.set_training_mode(training)

    def _find_params(self, actor: Actor, batch: Batch) -> None:
        try:
            self._acting_params = actor.find_params(batch, self._acting_params)
        except Exception as error:
            # what the policy raised when it was made may be the reason
            raise error from self._first_error or error.__cause__
        self._first_error = None

    def _check_observations(self, actor: Actor, batch: Batch) -> None:
        """
        Infinite observations are fine if the policy can handle them, as by clamping the range of a lidar.

        :raises NonFiniteRolloutError: if some observations are not finite, and neither is what the policy makes of them
        """
        steps = batch.with_non_finite_observations()
        if len(steps) == 0:
            return
        with th.no_grad():
            features = self.policy.extract_features(steps.observations)
            found = [*features] if isinstance(features, tuple) else [features]
            if all(bool(values.isfinite().all()) for values in found):
                found = [*evaluate_actions(self.policy, steps.observations, steps.actions)[:2], actor.heads(steps)]
        if not all(bool(values.isfinite().all()) for values in found):
            check_finite(self.rollout_buffer, "observations")
            raise NonFiniteRolloutError("The observations that the rollout buffer returned are not finite.")

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        """
        As Stable-Baselines3's, but what the schedule takes below zero counts as zero: the remaining progress is
        negative in the last update of most runs, since it may go beyond ``total_timesteps``.
        """
        rate = float(self.lr_schedule(self._current_progress_remaining))
        rate = check_rate("learning_rate", 0.0 if -math.inf < rate < 0.0 else rate)
        self.logger.record("train/learning_rate", rate)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            update_learning_rate(optimizer, rate)

    def _update_actor(self, actor: Actor, batch: Batch, n_newest: int, known: dict[str, float]) -> dict[str, float]:
        """
        Find a step and move the actor along it as far as the line search allows.

        :param n_newest: so many timesteps of the batch, its first, are those of the newest rollout
        :param known: values to log, among them ``n_trajectories``
        :return: values to log, by name
        """
        unchanged = Evaluation(objective=batch.advantages.mean().item(), kl=0.0)

        def warn(reason: str) -> None:
            warnings.warn(f"{type(self).__name__} left the policy unchanged: {reason}.", stacklevel=6)

        def refused(reason: str) -> dict[str, float]:
            warn(reason)
            return known | diagnose_step(unchanged, 0.0)

        if not actor.params:
            return refused("the actor has no trainable parameters")
        estimates = self._estimate(actor, batch, int(known["n_trajectories"]))
        old_head = estimates.batch.head()
        old_log_probs = actor.head.log_prob(old_head, batch.actions)
        self._check_log_probs(actor, batch[:n_newest], old_log_probs[:n_newest])
        if self._has_one_action:
            return known | diagnose_step(unchanged, 0.0)
        direction = self._find_direction(estimates)
        known |= direction.diagnostics
        if not bool(direction.vector.isfinite().all()):
            return refused("the update direction is not finite")
        if not bool(direction.vector.any()):
            return refused("the update direction is zero")
        length = self._find_length(direction, estimates)
        if not math.isfinite(length.eta):
            return refused("the trust region does not bound the update direction")
        known |= length.diagnostics
        max_kl = self.line_search_kl_factor * length.kl_estimated
        result = self._search(actor, batch, old_head, old_log_probs, length.eta * direction.vector, max_kl)
        if result.accepted is None and not math.isfinite(result.proposed.kl):
            warn("the KL divergence of the full step is not finite, and no shorter step was accepted")
        return known | diagnose_line_search(result, length.kl_estimated, unchanged)

    def _estimate(self, actor: Actor, batch: Batch, n_trajectories: int) -> PolicyEstimates:
        whole = actor.estimates(batch)
        gradient = actor.gradient(batch, whole)
        if self.adversarial_noise > 0.0:
            gradient = gradient - self.adversarial_noise * whole.standard_error() * gradient.sign()
        subsample = actor.estimates(batch.subsample(self.sub_sampling_factor, self.subsample_generator))
        return PolicyEstimates(actor.layout, gradient, whole, subsample, n_trajectories)

    def _check_log_probs(self, actor: Actor, batch: Batch, log_probs: th.Tensor) -> None:
        if not actor.check_log_probs(batch, log_probs) and not self._warned:
            self._warned = True
            warnings.warn(
                "The log-probabilities of the rollout differ from those of the same actions before the update. A "
                "callback may have changed the buffer, or the policy within a rollout, the policy may draw random "
                "numbers of its own, or its exploration noise is so small that rounding hides it.",
                stacklevel=5,
            )

    def _search(
        self,
        actor: Actor,
        batch: Batch,
        old_head: th.Tensor,
        old_log_probs: th.Tensor,
        step: th.Tensor,
        max_kl: float,
    ) -> LineSearchResult:
        """Move the actor along the step as far as the line search allows, or leave it exactly where it was."""
        with actor.moving_along(step) as move:

            def evaluate(fraction: float) -> Evaluation:
                move(fraction)
                try:
                    head = actor.heads(batch)
                except ValueError as error:
                    # torch refuses a distribution whose numbers have left the range of floats
                    if "Expected parameter" not in str(error):
                        raise
                    return Evaluation(math.nan, math.nan)
                ratio = th.exp(actor.head.log_prob(head, batch.actions) - old_log_probs)
                return Evaluation((batch.advantages * ratio).mean().item(), actor.head.kl(old_head, head).mean().item())

            result = backtracking_line_search(
                evaluate,
                batch.advantages.mean().item(),
                max_kl,
                self.line_search_shrinking_factor,
                self.line_search_max_iter,
            )
            move(result.step_fraction)
        return result

    def _warn_if_stuck(self, step_fraction: float) -> None:
        """Warn once of many updates in a row that were refused or cut back to the last trial."""
        # up to rounding
        last_trial = 1.000001 * self.line_search_shrinking_factor ** (self.line_search_max_iter - 1)
        is_stuck = step_fraction < 1.0 and step_fraction <= last_trial
        self._n_stuck = self._n_stuck + 1 if is_stuck else 0
        if self._n_stuck == STUCK:
            warnings.warn(
                f"{STUCK} updates in a row left the policy where it was, or moved it by the line search's shortest "
                "step. The policy may draw random numbers of its own, which the line search takes for a change; the "
                "step may be too long; or the advantages may be zero.",
                stacklevel=4,
            )

    def _diagnose_critic(self, losses: list[float]) -> dict[str, float]:
        buffer = self.rollout_buffer
        # in float64, where the square of a large return does not overflow
        values, returns = (array.flatten().astype(np.float64) for array in (buffer.values, buffer.returns))
        found = {"explained_variance": float(explained_variance(values, returns))}
        if losses:
            found["value_loss"] = float(np.mean(losses))
        return found

    def _log(self, values: dict[str, float]) -> None:
        """Log one update, and drop values that an earlier update logged and this one did not compute."""
        if hasattr(self.policy, "log_std"):
            values = {**values, "std": th.exp(self.policy.log_std).mean().item()}
        for name in self._logged.difference(values):
            # from all of them: a dump refuses tables of different length
            for table in (self.logger.name_to_value, self.logger.name_to_count, self.logger.name_to_excluded):
                table.pop(f"train/{name}", None)
        for name, value in values.items():
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self._logged = set(values)

    def learn(
        self: SelfTrustRegionAlgorithm,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "TrustRegionAlgorithm",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfTrustRegionAlgorithm:
        """
        Train for at least ``total_timesteps`` environment steps; the arguments are Stable-Baselines3's.

        :return: the trained model
        :raises ValueError: if an attribute was set to a value that the constructor would refuse, or ``n_steps`` to
            another value
        """
        self._check_arguments()
        self._learned_normalized = self._is_normalized
        if self.n_steps != self.rollout_buffer.buffer_size:
            raise ValueError(
                f"n_steps must be {self.rollout_buffer.buffer_size}, as when the model was made, but it is "
                f"{self.n_steps}; load() can change it"
            )
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
