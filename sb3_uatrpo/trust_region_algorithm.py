"""What trust region methods share, from a rollout to the log. This file moves the actor, ``critic.py`` the critic."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule, TensorDict
from stable_baselines3.common.utils import explained_variance, obs_as_tensor
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sb3_uatrpo.arguments import check_bool, check_integer, check_real
from sb3_uatrpo.batch import Batch, count_trajectories, rollout_batch
from sb3_uatrpo.core.estimates import Linearization, SampleEstimates, parts_of
from sb3_uatrpo.core.layers import LayeredLinearization
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult, backtracking_line_search
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.heads import head_of
from sb3_uatrpo.plain_mlp import layers_recorded, plain_actor
from sb3_uatrpo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.rollouts import DeferredRollouts

SelfTrustRegionAlgorithm = TypeVar("SelfTrustRegionAlgorithm", bound="TrustRegionAlgorithm")


@dataclass(frozen=True)
class Direction:
    """
    Where a method wants to go.

    :param vector: v, shape ``(d,)``
    :param diagnostics: what to log about it, by name
    :param isotropic_curvature: μ, where the direction came from a matrix with μI added
    """

    vector: th.Tensor
    diagnostics: dict[str, float] = field(default_factory=dict)
    isotropic_curvature: float = 0.0


@dataclass(frozen=True)
class Length:
    """
    How far a method wants to go.

    :param eta: η, not finite where the trust region does not bound the direction
    :param kl_estimated: the KL divergence that the method expects of θ_k + ηv, nats
    :param diagnostics: what to log about it, by name
    """

    eta: float
    kl_estimated: float
    diagnostics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyEstimates:
    """
    All that a method may use to find a step.

    :param param_names: names of the actor's parameters, in the order of their coordinates
    :param gradient: ĝ of the whole batch, with the adversarial noise if there is any, shape ``(d,)``
    :param batch: estimates over the whole batch
    :param subsample: estimates over the subsample
    :param n_trajectories: number of trajectories in the rollout, as ``count_trajectories`` counts them
    """

    param_names: list[str]
    gradient: th.Tensor
    batch: SampleEstimates
    subsample: SampleEstimates
    n_trajectories: int


class _Refused(Exception):
    """The numbers of this update allow no step. It never leaves the class."""


class TrustRegionAlgorithm(DeferredRollouts):
    """
    Base of the trust region methods of this package.

    One update goes: rollout buffer → batch → estimates of ĝ, F̂ and Σ̂ → a step (the subclass) → line search →
    critic → log. The actor's parameters are those that the action distribution depends on and that require gradients.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: The environment to learn from (if registered in Gym, can be str)
    :param learning_rate: The learning rate for the value function, it can be a function
        of the current progress remaining (from 1 to 0)
    :param n_steps: The number of steps to run for each environment per update
        (i.e. rollout buffer size is n_steps * n_envs where n_envs is number of environment copies running in parallel)
    :param batch_size: Minibatch size for the value function
    :param gamma: Discount factor γ
    :param gae_lambda: Factor λ for trade-off of bias vs variance for Generalized Advantage Estimator
    :param line_search_shrinking_factor: step-size reduction factor κ for the line search, in (0, 1)
    :param line_search_max_iter: most trials of the line search, κ^0 to κ^(max_iter-1)
    :param line_search_kl_factor: the line search accepts a KL divergence up to this many times the one estimated
    :param n_critic_updates: epochs of the value function over the batch in each update
    :param use_sde: Whether to use generalized State Dependent Exploration (gSDE)
        instead of action noise exploration (default: False)
    :param sde_sample_freq: Sample a new noise matrix every n steps when using gSDE
        Default: -1 (only sample at the beginning of the rollout)
    :param rollout_buffer_class: Rollout buffer class to use. If ``None``, it will be automatically selected.
    :param rollout_buffer_kwargs: Keyword arguments to pass to the rollout buffer on creation
    :param normalize_advantage: Whether to standardise the advantages over the batch
    :param sub_sampling_factor: every how many steps F̂ and Σ̂ take one
    :param adversarial_noise: noise x against the gradient: ĝ_j - x·se_j·sign(ĝ_j) replaces ĝ_j, with se_j the
        standard error of ĝ_j over the batch (paper, "Adversarial Gradient Noise"). The line search keeps the true
        objective.
    :param fast_rollouts: Whether rollouts only act at each step and find values and log-probabilities after the last
        one, in one batch. The buffer holds the same to float rounding; ``False`` collects as Stable-Baselines3 does.
    :param stats_window_size: Window size for the rollout logging, specifying the number of episodes to average
        the reported success rate, mean episode length, and mean reward over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: the verbosity level: 0 no output, 1 info, 2 debug
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: if an argument is out of range, of the wrong type, NaN or infinite
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule,
        n_steps: int,
        batch_size: int,
        gamma: float,
        gae_lambda: float,
        line_search_shrinking_factor: float,
        line_search_max_iter: int,
        line_search_kl_factor: float,
        n_critic_updates: int,
        use_sde: bool,
        sde_sample_freq: int,
        rollout_buffer_class: type[RolloutBuffer] | None,
        rollout_buffer_kwargs: dict[str, Any] | None,
        normalize_advantage: bool,
        sub_sampling_factor: int,
        adversarial_noise: float,
        fast_rollouts: bool,
        stats_window_size: int,
        tensorboard_log: str | None,
        policy_kwargs: dict[str, Any] | None,
        verbose: int,
        seed: int | None,
        device: th.device | str,
        _init_setup_model: bool,
    ) -> None:
        check_integer("verbose", verbose, 0)
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            # No entropy bonus; the value function has its own loss; the trust region bounds the step
            ent_coef=0.0,
            vf_coef=0.0,
            max_grad_norm=0.0,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            device=device,
            seed=seed,
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
        )
        self.batch_size = batch_size
        self.line_search_shrinking_factor = line_search_shrinking_factor
        self.line_search_max_iter = line_search_max_iter
        self.line_search_kl_factor = line_search_kl_factor
        self.n_critic_updates = n_critic_updates
        self.normalize_advantage = normalize_advantage
        self.sub_sampling_factor = sub_sampling_factor
        self.adversarial_noise = adversarial_noise
        self.fast_rollouts = fast_rollouts

        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        # Here and not in the constructor, so that arguments changed by load() are checked too
        self._check_arguments()
        self._warn_of_truncated_minibatches()
        # torch and SB3 take Python's own numbers only
        self.seed = None if self.seed is None else int(self.seed)
        self.learning_rate = self.learning_rate if callable(self.learning_rate) else float(self.learning_rate)
        super()._setup_model()
        self._head = head_of(self.policy.action_dist)

    def _count_actor_params(self) -> int:
        """d, found before there is a rollout."""
        # The buffer is empty, and its zeros are observations of the right shape
        empty = self.rollout_buffer.observations
        first = {key: array[0] for key, array in empty.items()} if isinstance(empty, dict) else empty[0]
        with self._policy_at_rest():
            params = self._find_actor_params([obs_as_tensor(first, self.device)])
        return sum(param.numel() for param in params)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_head"]

    def _check_arguments(self) -> None:
        """
        :raises ValueError: if an argument is out of range, of the wrong type, NaN or infinite
        """
        check_integer("n_steps", self.n_steps, 1)
        check_integer("batch_size", self.batch_size, 1)
        if not callable(self.learning_rate):
            check_real("learning_rate", self.learning_rate, 0.0, low_included=True)
        for name in ("gamma", "gae_lambda"):
            check_real(name, getattr(self, name), 0.0, 1.0, low_included=True, high_included=True)
        check_real("line_search_shrinking_factor", self.line_search_shrinking_factor, 0.0, 1.0)
        check_integer("line_search_max_iter", self.line_search_max_iter, 1)
        check_real("line_search_kl_factor", self.line_search_kl_factor, 0.0)
        check_integer("n_critic_updates", self.n_critic_updates, 0)
        check_integer("sub_sampling_factor", self.sub_sampling_factor, 1)
        check_real("adversarial_noise", self.adversarial_noise, 0.0, low_included=True)
        check_integer("sde_sample_freq", self.sde_sample_freq, -1)
        check_integer("stats_window_size", self._stats_window_size, 1)
        for name in ("use_sde", "normalize_advantage", "fast_rollouts"):
            check_bool(name, getattr(self, name))
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**32 - 1)

        n_total = int(self.n_steps) * self.n_envs
        if n_total < 2:
            raise ValueError(
                "n_steps * n_envs must be at least 2, since the covariance of the gradient needs two samples, "
                f"but n_steps is {self.n_steps} and n_envs is {self.n_envs}"
            )

    def _warn_of_truncated_minibatches(self) -> None:
        n_total = int(self.n_steps) * self.n_envs
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
        :param estimates: what the rollout says of ĝ, F̂ and Σ̂
        :return: v; one that is zero or not finite refuses the update
        """

    @abstractmethod
    def _find_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        """
        :param direction: where to, its vector finite and not zero
        :param estimates: what the rollout says of ĝ, F̂ and Σ̂
        :return: η and what is expected of the step
        """

    def train(self) -> None:
        """
        Update the policy from the rollout buffer: one trust region step of the actor, then epochs of the critic.

        :raises FloatingPointError: if the rollout holds NaN or infinity; nothing is changed then
        """
        batch = rollout_batch(self.rollout_buffer, self.normalize_advantage)
        n_trajectories = count_trajectories(self.rollout_buffer)
        with self._policy_at_rest():
            bytes_per_step = self._bytes_of_graph(batch[:2])
            parts = parts_of(len(batch), bytes_per_step)
            actor_params = self._find_actor_params(batch[part].observations for part in parts)
            self._update_actor(batch, n_trajectories, actor_params, bytes_per_step)
            # Parameters of the actor stay through the critic's epochs, batch-norm statistics that it shares do not
            stepped = self._heads(batch, parts) if any(True for _ in self.policy.buffers()) else None
        self._update_learning_rate(self.policy.optimizer)
        losses = fit_values(
            self.policy, batch, self.rollout_buffer, self.batch_size, self.n_critic_updates, actor_params
        )
        if losses:
            self._log({"value_loss": float(np.mean(losses))})
        if stepped is not None:
            with self._policy_at_rest():
                self._log({"critic_kl": self._head.kl(stepped, self._heads(batch, parts)).mean().item()})
            self.policy.set_training_mode(True)

        self._n_updates += 1
        buffer = self.rollout_buffer
        self._log({"n_trajectories": n_trajectories})
        # in float64, where the square of a large return does not overflow
        values, returns = (array.flatten().astype(np.float64) for array in (buffer.values, buffer.returns))
        self._log({"explained_variance": float(explained_variance(values, returns))})
        if hasattr(self.policy, "log_std"):
            self._log({"std": th.exp(self.policy.log_std).mean().item()})
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    @contextmanager
    def _policy_at_rest(self) -> Iterator[None]:
        """
        Evaluation mode, so that batch-norm statistics and dropout stay out of it, without the checks that turn a
        non-finite distribution into an error half-way through a step, and with attention that can be differentiated
        twice. The policy's one mutable distribution object is left as it was found: otherwise it would hold a graph,
        and the policy could not be copied.
        """
        distribution = self.policy.action_dist
        before = dict(vars(distribution))
        validate = th.distributions.Distribution._validate_args
        self.policy.set_training_mode(False)
        th.distributions.Distribution.set_default_validate_args(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            th.distributions.Distribution.set_default_validate_args(validate)
            vars(distribution).clear()
            vars(distribution).update(before)

    def _head_vector(self, observations: th.Tensor | TensorDict) -> th.Tensor:
        return self._head.vector(self.policy.get_distribution(observations))

    def _heads(self, batch: Batch, parts: list[slice]) -> th.Tensor:
        """The head of every step, without a graph, shape ``(n, k)``."""
        with th.no_grad():
            return th.cat([self._head_vector(batch[part].observations) for part in parts])

    def _bytes_of_graph(self, few: Batch) -> int:
        """What the graph of one step's head keeps beside the parameters, bytes."""
        known = {param.data_ptr() for param in self.policy.parameters()}
        n_bytes = 0

        def count(tensor: th.Tensor) -> th.Tensor:
            nonlocal n_bytes
            if tensor.data_ptr() not in known:
                n_bytes += tensor.numel() * tensor.element_size()
            return tensor

        with th.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            head = self._head_vector(few.observations)
        # and the D of its layers, where it is taken apart
        n_outputs = sum(
            module.out_features for module in plain_actor(self.policy) or () if isinstance(module, nn.Linear)
        )
        return n_bytes // len(few) + head.shape[1] * n_outputs * head.element_size()

    def _find_actor_params(self, observations: Iterable[th.Tensor | TensorDict]) -> tuple[th.Tensor, ...]:
        """
        The parameters that the action distribution depends on and that require gradients, read off its graph.

        :param observations: those of all steps, in parts, since a network may use some parameters for some steps only
        :return: parameters, in the policy's order
        """
        candidates = [param for param in self.policy.parameters() if param.requires_grad]
        chain = plain_actor(self.policy)
        if chain is not None:
            # No need to look: every one of these is used at every step
            of_chain = {param for module in chain for param in module.parameters()}
            if isinstance(self.policy.action_dist, DiagGaussianDistribution):
                of_chain.add(self.policy.log_std)
            return tuple(param for param in candidates if param in of_chain)
        used = [False] * len(candidates)
        for part in observations:
            head = self._head_vector(part)
            if head.requires_grad:
                gradients = th.autograd.grad(head.sum(), candidates, allow_unused=True)
                used = [known or gradient is not None for known, gradient in zip(used, gradients, strict=True)]
        return tuple(param for param, known in zip(candidates, used, strict=True) if known)

    def _update_actor(
        self, batch: Batch, n_trajectories: int, params: tuple[th.Tensor, ...], bytes_per_step: int
    ) -> None:
        """Find a step, search along it and log what came of it."""
        accepted: Evaluation | None = None
        step_fraction = 0.0
        try:
            estimates = self._estimate(batch, n_trajectories, params, bytes_per_step)
            direction = self._find_checked_direction(estimates)
            length = self._find_checked_length(direction, estimates)
        except _Refused as reason:
            warnings.warn(f"{type(self).__name__} left the policy unchanged: {reason}.", stacklevel=3)
        else:
            max_kl = self.line_search_kl_factor * length.kl_estimated
            result = self._search(batch, estimates.batch, params, length.eta * direction.vector, max_kl)
            accepted, step_fraction = result.accepted, result.step_fraction
            self._log({"kl_estimated": length.kl_estimated})
            if math.isfinite(result.proposed.kl) and length.kl_estimated > 0.0:
                self._log({"kl_proposed": result.proposed.kl, "kl_ratio": result.proposed.kl / length.kl_estimated})
        reached = accepted or Evaluation(objective=batch.advantages.mean().item(), kl=0.0)
        self._log(
            {
                "policy_objective": reached.objective,
                "kl_divergence_loss": reached.kl,
                "step_fraction": step_fraction,
                "is_line_search_success": float(accepted is not None),
            }
        )

    def _estimate(
        self, batch: Batch, n_trajectories: int, params: tuple[th.Tensor, ...], bytes_per_step: int
    ) -> PolicyEstimates:
        if not params:
            raise _Refused("the actor has no trainable parameters")
        n_params = sum(param.numel() for param in params)

        def estimates_over(steps: Batch) -> SampleEstimates:
            return SampleEstimates(
                lambda part: self._linearize(steps[part], params), len(steps), n_params, bytes_per_step
            )

        whole = estimates_over(batch)
        gradient = whole.gradient()
        if self.adversarial_noise > 0.0:
            gradient = gradient - self.adversarial_noise * whole.standard_error(gradient) * gradient.sign()
        acting = set(params)
        names = [name for name, param in self.policy.named_parameters() if param in acting]
        return PolicyEstimates(
            names, gradient, whole, estimates_over(batch.subsample(self.sub_sampling_factor)), n_trajectories
        )

    def _find_checked_direction(self, estimates: PolicyEstimates) -> Direction:
        found = self._find_direction(estimates)
        self._log(found.diagnostics)
        if not bool(found.vector.isfinite().all()):
            raise _Refused("the update direction is not finite")
        if not bool(found.vector.any()):
            raise _Refused("the update direction is zero")
        return found

    def _find_checked_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        found = self._find_length(direction, estimates)
        if not math.isfinite(found.eta):
            raise _Refused("the trust region does not bound the update direction")
        self._log(found.diagnostics)
        return found

    def _linearize(self, steps: Batch, params: tuple[th.Tensor, ...]) -> Linearization:
        with layers_recorded(self.policy, params) as layers:
            head = self._head_vector(steps.observations)
        fixed = head.detach()
        scores = steps.advantages[:, None] * self._head.score(fixed, steps.actions)

        def fisher_product(P: th.Tensor) -> th.Tensor:
            return self._head.fisher_product(fixed, P)

        if layers:
            return LayeredLinearization(head, params, fisher_product, scores, tuple(layers))
        return Linearization(head, params, fisher_product, scores)

    def _search(
        self, batch: Batch, whole: SampleEstimates, params: tuple[th.Tensor, ...], step: th.Tensor, max_kl: float
    ) -> LineSearchResult:
        """Move the actor along the step as far as the line search allows, or leave it exactly where it was."""
        before = [param.detach().clone() for param in params]
        changes = [
            part.view_as(param)
            for part, param in zip(step.split([param.numel() for param in params]), params, strict=True)
        ]
        old_head = whole.head()
        old_log_prob = self._head.log_prob(old_head, batch.actions)

        def evaluate(fraction: float) -> Evaluation:
            for param, start, change in zip(params, before, changes, strict=True):
                param.copy_(start + fraction * change)
            head = self._heads(batch, whole.parts)
            ratio = th.exp(self._head.log_prob(head, batch.actions) - old_log_prob)
            return Evaluation((batch.advantages * ratio).mean().item(), self._head.kl(old_head, head).mean().item())

        with th.no_grad():
            accepted = False
            try:
                result = backtracking_line_search(
                    evaluate,
                    batch.advantages.mean().item(),
                    max_kl,
                    self.line_search_shrinking_factor,
                    self.line_search_max_iter,
                )
                accepted = result.accepted is not None
            finally:
                if not accepted:
                    for param, start in zip(params, before, strict=True):
                        param.copy_(start)
        return result

    def _log(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.logger.record(f"train/{name}", value)

    def learn(
        self: SelfTrustRegionAlgorithm,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfTrustRegionAlgorithm:
        """
        Train for at least ``total_timesteps`` environment steps; the arguments are Stable-Baselines3's.

        :param total_timesteps: The total number of samples (env steps) to train on
        :param callback: callback(s) called at every step with state of the algorithm
        :param log_interval: number of updates between logs
        :param tb_log_name: the name of the run for TensorBoard logging; the class's name by default
        :param reset_num_timesteps: whether or not to reset the current timestep number
        :param progress_bar: Display a progress bar using tqdm and rich
        :return: the trained model
        :raises ValueError: if an attribute was set to a value that the constructor would refuse
        """
        self._check_arguments()
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name or type(self).__name__,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
