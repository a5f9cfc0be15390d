"""Rollout buffer → critic: epochs of minibatch regression on the returns. They leave the actor as it is."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn import functional as F
from torch.optim import optimizer as th_optimizer

from sb3_uatrpo.batch import rows_of
from sb3_uatrpo.guard import RunningCode, has_library_methods, warn_if_different
from sb3_uatrpo.hooks import GradientHooks
from sb3_uatrpo.plain_mlp import StandardMLP


def fit_values(
    policy: ActorCriticPolicy,
    rollout_buffer: RolloutBuffer,
    batch_size: int,
    n_epochs: int,
    actor_params: tuple[th.Tensor, ...],
) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches of the rollout, with the policy's optimizer.

    A minibatch whose loss or gradient is not finite is skipped, with a warning.

    :param policy: left in training mode
    :param rollout_buffer: a full buffer; its ``get`` yields the minibatches
    :param batch_size: steps in a minibatch
    :param n_epochs: passes over the rollout
    :param actor_params: parameters that the actor depends on; those that it shares with the critic are not changed
    :return: the loss of each minibatch that was not skipped
    """
    policy.set_training_mode(True)
    acting = set(actor_params)
    params = [param for param in policy.parameters() if param.requires_grad and param not in acting]
    losses: list[float] = []
    policy.optimizer.zero_grad()
    for param in policy.parameters():
        # An optimizer neither moves nor decays a parameter without a gradient, and some keep zeros in zero_grad
        param.grad = None
    if not params or n_epochs == 0:
        return losses
    general = GraphGradients(policy, params)
    candidate = ArrayGradients.of(policy, rollout_buffer, params)
    gradients: GraphGradients | ArrayGradients = general
    at_once = candidate is not None
    with _fused_adam(policy.optimizer) if at_once else nullcontext():
        for _ in range(n_epochs):
            for observations, returns in _minibatches(rollout_buffer, batch_size, at_once):
                code = RunningCode()
                with nullcontext() if candidate is None else code.noted():
                    loss = gradients.at(observations, returns)
                    if math.isfinite(loss):
                        policy.optimizer.step()
                if not math.isfinite(loss):
                    warnings.warn(
                        "The update of the critic skipped a minibatch whose loss or gradient is not finite.",
                        stacklevel=2,
                    )
                    continue
                losses.append(loss)
                if candidate is not None:
                    if code.is_library_code and not candidate.differs_from(general, observations):
                        gradients = candidate
                    candidate = None
    return losses


def _minibatches(rollout_buffer: RolloutBuffer, batch_size: int, at_once: bool) -> Iterator[tuple[Any, th.Tensor]]:
    """Observations and returns, in the order in which the buffer draws them."""
    if not at_once:
        for samples in rollout_buffer.get(batch_size):
            yield samples.observations, samples.returns
        return
    # one call for all steps draws the same order, and gathers only once
    samples = next(iter(rollout_buffer.get(None)))
    for start in range(0, len(samples.returns), batch_size):
        rows = slice(start, start + batch_size)
        yield rows_of(samples.observations, rows), samples.returns[rows]


class GraphGradients:
    """
    The general path: gradients by autograd, for any policy.

    :param policy: the policy
    :param params: the critic's parameters
    """

    def __init__(self, policy: ActorCriticPolicy, params: Sequence[th.Tensor]) -> None:
        self._policy = policy
        self.params = params

    def at(self, observations: Any, returns: th.Tensor) -> float:
        """
        :param observations: of one minibatch
        :param returns: shape ``(n,)``
        :return: the loss, with its gradient in the parameters; NaN if one of them is not finite
        """
        loss, gradients = self.loss_and_gradients(observations, returns)
        # One check for all: the sum is not finite if any of its terms is not
        total = th.stack([loss, *(gradient.sum() for gradient in gradients if gradient is not None)]).sum()
        if not math.isfinite(total.item()):
            return math.nan
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = None if gradient is None else _laid_out_as(param, gradient)
            if gradient is not None:
                # those of backward(); autograd.grad calls none
                for hook in (param._post_accumulate_grad_hooks or {}).values():
                    hook(param)
        return loss.item()

    def loss_and_gradients(
        self, observations: Any, returns: th.Tensor
    ) -> tuple[th.Tensor, tuple[th.Tensor | None, ...]]:
        """The loss, and its gradient for each parameter that it depends on."""
        loss = F.mse_loss(self._policy.predict_values(observations).flatten(), returns)
        if not loss.requires_grad:
            # a critic that is frozen or has no parameters, while something else is trained
            return loss, (None,) * len(self.params)
        return loss.detach(), th.autograd.grad(loss, self.params, allow_unused=True)


class ArrayGradients:
    """
    The fast path: the same for a standard MLP, in NumPy.

    :param mlp: the policy's layers
    """

    def __init__(self, mlp: StandardMLP) -> None:
        self._mlp = mlp
        params = mlp.critic_params
        # in one piece of memory, so that one sum tells whether all are finite
        self._flat = th.zeros(sum(param.numel() for param in params), dtype=th.float32, device="cpu")
        parts = self._flat.split([param.numel() for param in params])
        self._tensors = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
        self._gradients = [tensor.numpy() for tensor in self._tensors]

    @staticmethod
    def of(
        policy: ActorCriticPolicy, rollout_buffer: RolloutBuffer, params: Sequence[th.Tensor]
    ) -> "ArrayGradients | None":
        """
        None unless everything between the buffer and the optimizer is a library's own and has no hooks, on a standard
        MLP whose critic is trained whole and alone.
        """
        optimizer = policy.optimizer
        mlp = StandardMLP.recognise(policy)
        if (
            mlp is None
            or set(params) != set(mlp.critic_params)
            or GradientHooks(policy)
            or any(param._post_accumulate_grad_hooks for param in params)
            # the optimizers of others may keep gradients, or put new memory into parameters
            or not type(optimizer).__module__.startswith("torch.optim.")
            or "step" in vars(optimizer)
            or any(_step_hooks(optimizer))
            or type(rollout_buffer) is not RolloutBuffer
            or not has_library_methods(rollout_buffer, "get", "_get_samples", "to_torch")
        ):
            return None
        return ArrayGradients(mlp)

    @np.errstate(all="ignore")
    def at(self, observations: Any, returns: th.Tensor) -> float:
        """As in ``GraphGradients``."""
        loss = self._mlp.critic.squared_error(self._mlp.features(observations), returns.numpy(), self._gradients)
        if not math.isfinite(loss + float(self._flat.sum())):
            return math.nan
        for param, gradient in zip(self._mlp.critic_params, self._tensors, strict=True):
            param.grad = gradient
        return loss

    @np.errstate(all="ignore")
    def differs_from(self, general: GraphGradients, observations: Any) -> bool:
        """
        Whether values or gradients differ from autograd's by more than rounding; if so, a warning names them.

        Every target is below its value by the same amount, so all errors have one sign. With real targets, errors may
        cancel in the gradient and leave only rounding to compare.
        """
        critic, policy = self._mlp.critic, self._mlp.policy
        features = self._mlp.features(observations)
        with th.no_grad():
            values = policy.predict_values(observations).flatten()
        targets = values - 1.0 - values.abs().amax()
        critic.squared_error(features, targets.numpy(), self._gradients)
        expected: dict[th.Tensor, Any] = dict(
            zip(general.params, general.loss_and_gradients(observations, targets)[1], strict=True)
        )
        outputs: dict[str, tuple[Any, ...]] = {
            # values may be close to zero, as without rewards, but their rounding errors need not be
            "the values": (critic(features)[:, 0], values, critic.size_of_terms(features)),
            "the critic's gradient": (
                self._flat,
                th.cat([expected[param].flatten() for param in self._mlp.critic_params]),
            ),
        }
        return warn_if_different(policy, outputs)


def _step_hooks(optimizer: th.optim.Optimizer) -> list[dict]:
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        th_optimizer._global_optimizer_pre_hooks,
        th_optimizer._global_optimizer_post_hooks,
    ]


def _laid_out_as(param: th.Tensor, gradient: th.Tensor) -> th.Tensor:
    """The gradient with the strides of the parameter, since optimizers may run through both in memory order."""
    return gradient if gradient.stride() == param.stride() else th.empty_like(param).copy_(gradient)


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    Within this context, Adam and AdamW use their fused implementation, unless the user has chosen another. It updates
    all parameters in one call, and computes the same numbers up to rounding. Afterwards, the setting is as before, so
    checkpoints are those of Stable-Baselines3. It runs through memory, so a parameter, its gradient and its state need
    the same layout.
    """
    chosen = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in (th.optim.Adam, th.optim.AdamW)
        and group["fused"] is group["foreach"] is None
        and not (group["capturable"] or group["differentiable"])
        and all(
            tensor.is_contiguous()
            for param in group["params"]
            for tensor in (param, *optimizer.state.get(param, {}).values())
            if isinstance(tensor, th.Tensor)
        )
    ]
    try:
        for group in chosen:
            group["fused"] = True
        yield
    finally:
        for group in chosen:
            group["fused"] = None
