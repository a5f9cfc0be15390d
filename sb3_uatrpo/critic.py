"""Rollout buffer → critic: epochs of minibatch regression on the returns. They leave θ as it is."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn import functional as F

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.plain import is_plain_buffer, is_plain_optimizer
from sb3_uatrpo.policies import evaluate_actions


def fit_values(actor: Actor, rollout_buffer: RolloutBuffer, batch_size: int, n_epochs: int) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches of the rollout, with the policy's optimizer. A minibatch whose
    loss or gradient is not finite is skipped, with a warning.

    :param actor: the policy, which is left in training mode, and θ; parameters that actor and critic share are not
        changed
    :param rollout_buffer: a full buffer; its ``get`` yields the minibatches
    :param batch_size: timesteps in a minibatch
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
    is_plain = (
        mlp is not None
        and set(params) == set(mlp.critic_params)
        and is_plain_buffer(rollout_buffer)
        and is_plain_optimizer(optimizer)
    )
    gradients = partial(_array_gradients, mlp) if is_plain else partial(_graph_gradients, policy, params)
    with _fused_adam(optimizer) if is_plain else nullcontext():
        for _ in range(n_epochs):
            for loss in gradients(rollout_buffer, batch_size):
                if not math.isfinite(loss):
                    warnings.warn(
                        "The update of the critic skipped a minibatch whose loss or gradient is not finite.",
                        stacklevel=2,
                    )
                    continue
                optimizer.step()
                losses.append(loss)
    return losses


def _graph_gradients(
    policy: ActorCriticPolicy, params: Sequence[th.Tensor], rollout_buffer: RolloutBuffer, batch_size: int
) -> Iterator[float]:
    """
    For each minibatch, leave the gradient of the loss in the parameters, and yield the loss, or NaN if either is not
    finite. By autograd, for any policy.
    """
    for samples in rollout_buffer.get(batch_size):
        values = evaluate_actions(policy, samples)[0].flatten()
        # torch 2.8 does not differentiate the error of two types
        dtype = th.promote_types(values.dtype, samples.returns.dtype)
        loss = F.mse_loss(values.to(dtype), samples.returns.to(dtype))
        policy.optimizer.zero_grad()
        # a critic may be frozen or have no parameters, while something else is trained
        if loss.requires_grad:
            loss.backward(inputs=params)
        # one check for all, since the sum is not finite if any of its terms is not, and one transfer from a GPU
        parts = [loss.detach(), *(param.grad.sum() for param in params if param.grad is not None)]
        value, total = th.stack([parts[0], th.stack(parts).sum()]).tolist()
        yield value if math.isfinite(total) else math.nan


def _array_gradients(mlp: Any, rollout_buffer: RolloutBuffer, batch_size: int) -> Iterator[float]:
    """The same for a plain MLP, in NumPy. The minibatches are the buffer's own, gathered only once."""
    params = mlp.critic_params
    sizes = [param.numel() for param in params]
    # in one piece of memory, so that one sum tells whether all are finite
    flat = th.zeros(sum(sizes), dtype=th.float32, device="cpu")
    for param, gradient in zip(params, flat.split(sizes), strict=True):
        param.grad = gradient.view_as(param)
    gradients = [param.grad.numpy() for param in params if param.grad is not None]
    # one call for all timesteps draws the same order
    samples = next(iter(rollout_buffer.get(None)))
    with np.errstate(all="ignore"):
        features, returns = mlp.features(samples.observations), samples.returns.numpy()
        for start in range(0, len(returns), batch_size):
            part = slice(start, start + batch_size)
            loss = mlp.critic.squared_error(features[part], returns[part], gradients)
            yield loss if math.isfinite(loss + float(flat.sum())) else math.nan


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    Adam and AdamW update all parameters in one call, unless the user has chosen otherwise, with the same numbers up to
    rounding. Checkpoints do not show the setting.
    """
    chosen = [
        group
        for group in optimizer.param_groups
        if group["fused"] is group["foreach"] is None and not (group["capturable"] or group["differentiable"])
    ]
    try:
        for group in chosen:
            group["fused"] = True
        yield
    finally:
        for group in chosen:
            group["fused"] = None
