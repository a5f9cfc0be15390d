"""Batch → values: epochs of minibatch regression of the critic on the returns, which leave the actor alone."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import TensorDict
from torch.nn import functional as F

from sb3_uatrpo.batch import Batch

Minibatches = Iterator[tuple[th.Tensor | TensorDict, th.Tensor]]


def fit_values(
    policy: ActorCriticPolicy,
    batch: Batch,
    rollout_buffer: RolloutBuffer,
    batch_size: int,
    n_epochs: int,
    actor_params: tuple[th.Tensor, ...],
) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches, with the policy's optimizer.

    A minibatch whose loss or gradient is not finite changes nothing, with a warning.

    :param policy: left in training mode
    :param batch: the rollout
    :param rollout_buffer: where the batch came from
    :param batch_size: steps in a minibatch
    :param n_epochs: passes over the batch
    :param actor_params: parameters that the actor depends on: what the critic shares with it stays where it is
    :return: the loss of each minibatch that was taken
    """
    policy.set_training_mode(True)
    acting = set(actor_params)
    # An optimizer neither moves nor decays a parameter without a gradient
    policy.optimizer.zero_grad()
    params = [param for param in policy.parameters() if param.requires_grad and param not in acting]
    losses: list[float] = []
    if not params:
        return losses
    with _fused_adam(policy.optimizer):
        for _ in range(n_epochs):
            for observations, returns in _minibatches(batch, rollout_buffer, batch_size):
                loss = F.mse_loss(policy.predict_values(observations).flatten(), returns)
                gradients = th.autograd.grad(loss, params, allow_unused=True)
                loss = loss.detach()
                # One number that is not finite unless all are
                total = th.stack([loss, *(gradient.sum() for gradient in gradients if gradient is not None)]).sum()
                if not math.isfinite(total.item()):
                    warnings.warn(
                        "The update left the critic unchanged in a minibatch: its loss or gradient is not finite.",
                        stacklevel=2,
                    )
                    continue
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
                policy.optimizer.step()
                losses.append(loss.item())
    return losses


def _minibatches(batch: Batch, rollout_buffer: RolloutBuffer, batch_size: int) -> Minibatches:
    """One epoch in the order of ``RolloutBuffer.get``: one permutation from NumPy's global generator."""
    cls = type(rollout_buffer)
    if cls.get not in (RolloutBuffer.get, DictRolloutBuffer.get) or cls._get_samples not in (
        RolloutBuffer._get_samples,
        DictRolloutBuffer._get_samples,
    ):
        # A buffer with an order or samples of its own
        for samples in rollout_buffer.get(batch_size):
            yield samples.observations, samples.returns
        return
    order = th.as_tensor(np.random.permutation(len(batch)), device=batch.returns.device)
    for indices in order.split(batch_size):
        minibatch = batch[indices]
        yield minibatch.observations, minibatch.returns


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    On the CPU Adam updates all parameters in one call instead of one each, unless its user decided otherwise.

    What it computes is the same, to the last digits, and its saved state as well.
    """
    groups = optimizer.param_groups
    chosen = type(optimizer) in (th.optim.Adam, th.optim.AdamW) and all(
        group["fused"] is None
        and group["foreach"] is None
        and not (group["capturable"] or group["differentiable"])
        and all(param.device.type == "cpu" and param.is_floating_point() for param in group["params"])
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
