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

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import evaluate_actions
from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.core.array_mlp import Array
from sb3_uatrpo.plain_mlp import PlainMLP


def fit_values(actor: Actor, rollout_buffer: RolloutBuffer, batch_size: int, n_epochs: int) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches of the rollout, with the policy's optimizer. A minibatch whose
    loss or gradient is not finite is skipped, with a warning.

    :param actor: the policy, which is left in training mode, and θ; parameters that actor and critic share are not
        changed
    :param rollout_buffer: a full buffer; its ``get`` yields the minibatches
    :param batch_size: steps in a minibatch
    :param n_epochs: passes over the rollout
    :return: the loss of each minibatch that was not skipped
    """
    policy, optimizer, mlp = actor.policy, actor.policy.optimizer, actor.mlp
    policy.set_training_mode(True)
    acting = set(actor.params)
    params = [param for param in policy.parameters() if param.requires_grad and param not in acting]
    losses: list[float] = []
    optimizer.zero_grad()
    for param in policy.parameters():
        # An optimizer neither moves nor decays a parameter without a gradient, and some keep zeros in zero_grad
        param.grad = None
    if not params or n_epochs == 0:
        return losses
    # trained whole and alone, by an optimizer that takes any gradients, from a buffer of known order
    in_numpy = (
        mlp is not None
        and set(params) == set(mlp.critic_params)
        and type(rollout_buffer) in (RolloutBuffer, LeanRolloutBuffer)
        and not {"get", "_get_samples"} & vars(rollout_buffer).keys()
        and type(optimizer) in (th.optim.Adam, th.optim.AdamW)
        and "step" not in vars(optimizer)
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (th_optimizer._global_optimizer_pre_hooks or th_optimizer._global_optimizer_post_hooks)
    )
    gradients: ArrayGradients | GraphGradients
    gradients = ArrayGradients(mlp) if in_numpy and mlp is not None else GraphGradients(policy, params)
    with _fused_adam(optimizer) if in_numpy else nullcontext():
        for _ in range(n_epochs):
            for loss in gradients.of_minibatches(rollout_buffer, batch_size):
                if not math.isfinite(loss):
                    warnings.warn(
                        "The update of the critic skipped a minibatch whose loss or gradient is not finite.",
                        stacklevel=2,
                    )
                    continue
                optimizer.step()
                losses.append(loss)
    return losses


class GraphGradients:
    """
    Gradients by autograd, for any policy.

    :param policy: the policy
    :param params: the critic's parameters
    """

    def __init__(self, policy: ActorCriticPolicy, params: Sequence[th.Tensor]) -> None:
        self._policy = policy
        self._params = params

    def of_minibatches(self, rollout_buffer: RolloutBuffer, batch_size: int) -> Iterator[float]:
        """
        :param rollout_buffer: a full buffer
        :param batch_size: steps in a minibatch
        :return: for each minibatch, the loss, while its gradient is in the parameters; NaN if one of them is not finite
        """
        return map(self._at, rollout_buffer.get(batch_size))

    def _at(self, samples: Any) -> float:
        values = evaluate_actions(self._policy, samples.observations, samples.actions)[0].flatten()
        # torch 2.8 does not differentiate the error of two types
        dtype = th.promote_types(values.dtype, samples.returns.dtype)
        loss = F.mse_loss(values.to(dtype), samples.returns.to(dtype))
        for param in self._params:
            param.grad = None
        # a critic may be frozen or have no parameters, while something else is trained
        if loss.requires_grad:
            loss.backward(inputs=self._params)
        # one check for all, since the sum is not finite if any of its terms is not, and one transfer from a GPU
        parts = [loss.detach(), *(param.grad.sum() for param in self._params if param.grad is not None)]
        value, total = th.stack([parts[0], th.stack(parts).sum()]).tolist()
        return value if math.isfinite(total) else math.nan


class ArrayGradients:
    """
    The same for a plain MLP, in NumPy.

    :param mlp: the policy's layers
    """

    def __init__(self, mlp: PlainMLP) -> None:
        self._mlp = mlp
        params = mlp.critic_params
        # in one piece of memory, so that one sum tells whether all are finite
        self._flat = th.zeros(sum(param.numel() for param in params), dtype=th.float32, device="cpu")
        parts = self._flat.split([param.numel() for param in params])
        self._tensors = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
        self._gradients = [tensor.numpy() for tensor in self._tensors]

    def of_minibatches(self, rollout_buffer: RolloutBuffer, batch_size: int) -> Iterator[float]:
        """As in ``GraphGradients``; the minibatches are the buffer's own, gathered only once."""
        # one call for all steps draws the same order
        samples = next(iter(rollout_buffer.get(None)))
        with np.errstate(all="ignore"):
            features, returns = self._mlp.features(samples.observations), samples.returns.numpy()
        for param, gradient in zip(self._mlp.critic_params, self._tensors, strict=True):
            param.grad = gradient
        for start in range(0, len(returns), batch_size):
            yield self._at(features[start : start + batch_size], returns[start : start + batch_size])

    @np.errstate(all="ignore")
    def _at(self, features: Array, returns: Array) -> float:
        loss = self._mlp.critic.squared_error(features, returns, self._gradients)
        return loss if math.isfinite(loss + float(self._flat.sum())) else math.nan


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    Adam and AdamW update all parameters in one call, unless the user has chosen otherwise, with the same numbers up to
    rounding. It needs the same layout for a parameter, its gradient and its state. Checkpoints do not show the setting.
    """
    chosen = [
        group
        for group in optimizer.param_groups
        if group["fused"] is group["foreach"] is None
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
