"""
The order of an update: rollout → batch → estimates → direction → length → line search → critic → log.

A *head* h holds the parameters of the action distribution at each timestep, such as means and log σ: a tensor of shape
``(n, k)``. The distribution's *family* computes log-probabilities and KL divergences from it.
"""

import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch as th
from stable_baselines3.common.utils import update_learning_rate

from sb3_uatrpo import diagnostics
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.arguments import check_rate
from sb3_uatrpo.batch import Batch, rollout_batch
from sb3_uatrpo.buffers import NonFiniteRolloutError, check_finite, count_trajectories
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult, backtracking_line_search
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.plain_mlp import one_thread_if_small
from sb3_uatrpo.policies import ActsInNumpy, evaluate_actions, masks_of
from sb3_uatrpo.rollout_pool import require_plain_buffer
from sb3_uatrpo.sb3_algorithm import SB3Algorithm

#: So many updates in a row that hardly moved the policy give a warning
STUCK = 10


@dataclass(frozen=True)
class PolicyEstimates:
    """
    Everything that a method may use to find a step: ĝ, the mean over timesteps of ξ_i = A_i∇log π(a_i|s_i); Σ̂, the
    covariance of ξ_i, and not of their mean; F̂, the Fisher matrix of π, the mean over states.

    :param layout: how many coordinates belong to each parameter of the policy, see ``Actor.layout``
    :param gradient: ĝ of the whole batch, including adversarial noise, shape ``(d,)``
    :param whole: estimates over the whole batch
    :param subsample: estimates over the subsample
    :param n_trajectories: number of trajectories in the batch, as ``count_trajectories`` counts them
    """

    layout: th.Tensor
    gradient: th.Tensor
    whole: SampleEstimates
    subsample: SampleEstimates
    n_trajectories: int


@dataclass(frozen=True)
class Direction:
    """
    The direction of a step.

    :param vector: v, shape ``(d,)``
    :param values: values to log, by name
    :param isotropic_curvature: μ, if the direction comes from a matrix with μI added
    """

    vector: th.Tensor
    values: dict[str, float] = field(default_factory=dict)
    isotropic_curvature: float = 0.0


@dataclass(frozen=True)
class Length:
    """
    The length of a step.

    :param eta: η, not finite if the trust region does not bound the direction
    :param kl_estimated: the KL divergence that the method expects at θ_k + ηv, nats
    :param values: values to log, by name
    """

    eta: float
    kl_estimated: float
    values: dict[str, float] = field(default_factory=dict)


class TrustRegionAlgorithm(SB3Algorithm):
    """
    Base class of this package's trust region methods: the order of an update. A subclass finds the direction and the
    length of the step.
    """

    @abstractmethod
    def _find_direction(self, estimates: PolicyEstimates) -> Direction:
        """
        :param estimates: estimates of ĝ, F̂ and Σ̂ from the rollout, which a method may take into averages of its own;
            they stay there if the step is refused
        :return: v; if v is zero or not finite, the update is refused
        """

    @abstractmethod
    def _find_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        """
        :param direction: the direction, finite and not zero
        :param estimates: estimates of ĝ, F̂ and Σ̂ from the rollout
        :return: η and the expected effect of the step
        """

    def _setup_model(self) -> None:
        super()._setup_model()
        self._n_stuck, self._warned_of_log_probs = 0, False
        #: names of the values that the last update logged
        self._logged: set[str] = set()

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
        # the policy as a function of its actor's parameters θ
        actor = Actor(self.policy)
        with one_thread_if_small(actor.mlp):
            self._update(actor)

    def _update(self, actor: Actor) -> None:
        # The timesteps of the buffer, environment by environment
        rollout = rollout_batch(self.rollout_buffer, self.normalize_advantage, self._takes_masks)
        # In evaluation mode, without gradient hooks, on a copy of action_dist that is dropped with its graph
        with actor.update_mode():
            self._check_observations(actor, rollout)
            self._update_learning_rate(self.policy.optimizer)
            batch, n_trajectories, values = self._join_old_rollouts(rollout)
            # θ: the trainable parameters that the action distribution depends on, in this batch or an earlier one,
            # those that it shares with the critic included; then one step of θ
            self._find_params(actor, batch)
            values |= self._update_actor(actor, batch, len(rollout), n_trajectories)
            # θ is settled, but the critic's epochs may change batch-norm statistics that the actor shares
            shares_statistics = any(True for _ in self.policy.buffers())
            updated_head = actor.heads(batch) if shares_statistics else None
        # Epochs of the critic, in the parameters outside θ; the distribution that they leave in the policy is dropped
        with actor.distribution_of_its_own():
            losses = fit_values(actor, self.rollout_buffer, self.batch_size, self.n_critic_updates)
        if updated_head is not None:
            with actor.update_mode():
                values["critic_kl"] = actor.family.kl(updated_head, actor.heads(batch)).mean().item()
        self._show_distribution(rollout)
        if self.n_reused_rollouts > 0:
            self.rollout_pool.add(self.rollout_buffer, self._last_obs, self._last_episode_starts, self._takes_masks)
        # Log, without what the update before logged and this one did not compute
        self._n_updates += 1
        values |= {"n_trajectories": n_trajectories} | diagnostics.critic(self.rollout_buffer, losses)
        self._logged = diagnostics.record(self.logger, self.policy, values, self._logged)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if actor.params and not self._has_one_action:
            self._warn_if_stuck(values["step_fraction"])

    def _join_old_rollouts(self, rollout: Batch) -> tuple[Batch, int, dict[str, float]]:
        """
        The rollout, followed by those that are reused, whose advantages are today's critic's times importance ratios;
        all are normalised together, from raw ones. And the number of trajectories, and values to log.
        """
        if self.n_reused_rollouts == 0:
            return rollout, count_trajectories(self.rollout_buffer), {}
        require_plain_buffer(self.rollout_buffer)
        return self.rollout_pool.join(
            rollout, self.rollout_buffer, self.policy, self.gae_lambda, self.normalize_advantage
        )

    def _update_actor(self, actor: Actor, batch: Batch, n_newest: int, n_trajectories: int) -> dict[str, float]:
        """
        Find a step and move the actor along it as far as the line search allows.

        :param n_newest: so many timesteps of the batch, its first, are those of the newest rollout
        :return: values to log, by name
        """
        unchanged = Evaluation(objective=batch.advantages.mean().item(), kl=0.0)
        values: dict[str, float] = {}

        def refused(reason: str) -> dict[str, float]:
            self._warn_of_refusal(reason)
            return values | diagnostics.step(unchanged, step_fraction=0.0)

        if not actor.params:
            return refused("the actor has no trainable parameters")
        # ĝ of the whole batch; F̂ and Σ̂ of the subsample, and of the whole batch where a length is taken from it
        estimates = self._estimate(actor, batch, n_trajectories)
        old_head = estimates.whole.head()
        old_log_probs = actor.family.log_prob(old_head, batch.actions)
        self._check_log_probs(actor, batch[:n_newest], old_log_probs[:n_newest])
        if self._has_one_action:
            return diagnostics.step(unchanged, step_fraction=0.0)
        # v
        direction = self._find_direction(estimates)
        values |= direction.values
        if not bool(direction.vector.isfinite().all()):
            return refused("the update direction is not finite")
        if not bool(direction.vector.any()):
            return refused("the update direction is zero")
        # η
        length = self._find_length(direction, estimates)
        if not math.isfinite(length.eta):
            return refused("the trust region does not bound the update direction")
        values |= length.values
        # θ_k + κ^i·ηv
        max_kl = self.line_search_kl_factor * length.kl_estimated
        result = self._search(actor, batch, old_head, old_log_probs, length.eta * direction.vector, max_kl)
        return values | diagnostics.line_search(result, length.kl_estimated, unchanged)

    def _estimate(self, actor: Actor, batch: Batch, n_trajectories: int) -> PolicyEstimates:
        whole = actor.estimates(batch)
        # of the whole batch; with gradient hooks, computed once more while they are attached, for ĝ alone
        gradient = actor.gradient(batch, whole)
        if self.adversarial_noise > 0.0:
            gradient = gradient - self.adversarial_noise * whole.standard_error() * gradient.sign()
        subsample = actor.estimates(batch.subsample(self.sub_sampling_factor, self.subsample_generator))
        return PolicyEstimates(actor.layout, gradient, whole, subsample, n_trajectories)

    def _search(
        self, actor: Actor, batch: Batch, old_head: th.Tensor, old_log_probs: th.Tensor, step: th.Tensor, max_kl: float
    ) -> LineSearchResult:
        """Move the actor along the step as far as the line search allows, or leave it exactly where it was."""
        refusals: list[str] = []
        with actor.moving_along(step) as move:

            def evaluate(fraction: float) -> Evaluation:
                move(fraction)
                try:
                    head = actor.heads(batch)
                except ValueError as error:
                    # our own are of subclasses
                    if type(error) is not ValueError:
                        raise
                    # torch refuses a distribution whose numbers have left the range of floats
                    refusals.append(f" ({str(error).partition(chr(10))[0]})")
                    return Evaluation(math.nan, math.nan)
                ratio = th.exp(actor.family.log_prob(head, batch.actions) - old_log_probs)
                kl = actor.family.kl(old_head, head).mean().item()
                return Evaluation((batch.advantages * ratio).mean().item(), kl)

            result = backtracking_line_search(
                evaluate,
                batch.advantages.mean().item(),
                max_kl,
                self.line_search_shrinking_factor,
                self.line_search_max_iter,
            )
            move(result.step_fraction)
        if result.accepted is None and not math.isfinite(result.proposed.kl):
            self._warn_of_refusal(
                "the KL divergence of the full step is not finite, and no shorter step was accepted"
                + "".join(refusals[:1])
            )
        return result

    def _find_params(self, actor: Actor, batch: Batch) -> None:
        try:
            # what earlier batches used stays in θ
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
        bad = batch.with_non_finite_observations()
        if len(bad) == 0:
            return
        with th.no_grad():
            features = self.policy.extract_features(bad.observations)
            outputs = [*features] if isinstance(features, tuple) else [features]
            if all(bool(values.isfinite().all()) for values in outputs):
                outputs = [*evaluate_actions(self.policy, bad)[:2], actor.heads(bad)]
        if not all(bool(values.isfinite().all()) for values in outputs):
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

    def _check_log_probs(self, actor: Actor, batch: Batch, log_probs: th.Tensor) -> None:
        if not actor.check_log_probs(batch, log_probs) and not self._warned_of_log_probs:
            self._warned_of_log_probs = True
            warnings.warn(
                "The log-probabilities of the rollout differ from those of the same actions before the update. A "
                "callback may have changed the buffer, or the policy within a rollout, the policy may draw random "
                "numbers of its own, or its exploration noise is so small that rounding hides it.",
                stacklevel=5,
            )

    def _show_distribution(self, batch: Batch) -> None:
        """
        Leave the new distribution in the policy's ``action_dist``, without a graph: that of the whole rollout if it can
        be computed when it is read, else that of as many timesteps as a minibatch has.
        """
        policy: Any = self.policy
        if isinstance(policy, ActsInNumpy):
            # its action_dist is computed when it is read
            policy.show_distribution(batch.observations, *masks_of(policy, batch).values())
            return
        timesteps = batch[: self.batch_size]
        training = policy.training
        policy.set_training_mode(False)
        # a policy may draw random numbers of its own
        with th.random.fork_rng([policy.device] if policy.device.type == "cuda" else []), th.no_grad():
            evaluate_actions(policy, timesteps)
        policy.set_training_mode(training)

    def _warn_of_refusal(self, reason: str) -> None:
        warnings.warn(f"{type(self).__name__} left the policy unchanged: {reason}.", stacklevel=6)

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
