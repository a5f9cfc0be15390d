"""Batch → values: epochs of minibatch regression of the critic on the returns, which leave the actor alone."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn import functional as F


def fit_values(
    policy: ActorCriticPolicy,
    rollout_buffer: RolloutBuffer,
    batch_size: int,
    n_epochs: int,
    actor_params: tuple[th.Tensor, ...],
) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches of the rollout, with the policy's optimizer.

    A minibatch whose loss or gradient is not finite changes nothing, with a warning.

    :param policy: left in training mode
    :param rollout_buffer: a full one; its ``get`` makes the minibatches
    :param batch_size: steps in a minibatch
    :param n_epochs: passes over the rollout
    :param actor_params: parameters that the actor depends on: what the critic shares with it stays where it is
    :return: the loss of each minibatch that was taken
    """
    policy.set_training_mode(True)
    acting = set(actor_params)
    params = [param for param in policy.parameters() if param.requires_grad and param not in acting]
    losses: list[float] = []
    # An optimizer neither moves nor decays a parameter without a gradient
    policy.optimizer.zero_grad()
    if not params:
        return losses
    with _fused_adam(policy.optimizer):
        for _ in range(n_epochs):
            for samples in rollout_buffer.get(batch_size):
                loss = F.mse_loss(policy.predict_values(samples.observations).flatten(), samples.returns)
                gradients = th.autograd.grad(loss, params, allow_unused=True)
                loss = loss.detach()
                # One number that is not finite unless all are
                total = th.stack([loss, *(gradient.sum() for gradient in gradients if gradient is not None)]).sum()
                if math.isfinite(total.item()):
                    for param, gradient in zip(params, gradients, strict=True):
                        param.grad = None if gradient is None else _laid_out_as(param, gradient)
                    policy.optimizer.step()
                    losses.append(loss.item())
                else:
                    warnings.warn(
                        "The update left the critic unchanged in a minibatch: its loss or gradient is not finite.",
                        stacklevel=2,
                    )
    return losses


def _laid_out_as(param: th.Tensor, gradient: th.Tensor) -> th.Tensor:
    """The gradient in the parameter's order in memory, in which optimizers may walk through both."""
    return gradient if gradient.stride() == param.stride() else th.empty_like(param).copy_(gradient)


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    On the CPU Adam updates all parameters in one call instead of one each, unless its user decided otherwise.

    What it computes is the same, to the last digits, and its saved state as well. It walks through memory, so all that
    belongs to a parameter must lie there in the same order: gradients do, parameters and state are looked at.
    """
    groups = optimizer.param_groups
    chosen = type(optimizer) in (th.optim.Adam, th.optim.AdamW) and all(
        group["fused"] is None
        and group["foreach"] is None
        and not (group["capturable"] or group["differentiable"])
        and all(param.device.type == "cpu" and param.is_floating_point() for param in group["params"])
        and all(
            tensor.is_contiguous()
            for param in group["params"]
            for tensor in (param, *optimizer.state.get(param, {}).values())
            if isinstance(tensor, th.Tensor)
        )
        for group in groups
    )
    if not chosen:
        yield
        return
    try:
        for group in groups:
            group["fused"] = True
        yield
    finally:
        for group in groups:
            group["fused"] = None
