"""The moving averages against dense averages, and what the sketch's state promises."""

import numpy as np
import pytest
import torch as th

from sb3_uatrpo.core.sketch import Sketch

CPU = th.device("cpu")


def random_matrices(d: int, n: int):
    rng = np.random.default_rng(0)
    return [(A @ A.T, B @ B.T) for A, B in (rng.normal(size=(2, d, d)) for _ in range(n))]


def ready(beta: float, d: int = 6, m: int = 4, seed: int = 0) -> Sketch:
    sketch = Sketch(d, m, beta, seed, th.float64, CPU)
    sketch.draw_once()
    return sketch


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_statistic_is_the_projection_of_the_averaged_matrices(beta):
    sketch = ready(beta)
    omega = sketch.omega.numpy().copy()
    F = S = np.zeros((6, 6))
    for k, (f, s) in enumerate(random_matrices(6, 5), start=1):
        coefficient = 0.1 * k  # c·R_n² may change from batch to batch
        found = sketch.update(th.as_tensor(f @ omega), th.as_tensor(s @ omega), coefficient)
        F, S = beta * F + (1 - beta) * f, beta * S + (1 - beta) * s
        expected = (F + coefficient * S) @ omega / (1 - beta**k)
        assert found.numpy() == pytest.approx(expected)
        assert (sketch.omega.numpy() == omega).all()


@pytest.mark.parametrize(("beta", "n_matrices"), [(0.0, 1), (0.9, 3)])
def test_bytes_are_those_of_the_tensors_and_without_averages_nothing_is_stored(beta, n_matrices):
    sketch = ready(beta)
    sketch.update(sketch.omega.clone(), sketch.omega, 1.0)
    tensors = (sketch.omega, sketch.y_fisher, sketch.y_covariance)
    assert sketch.n_bytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors) == n_matrices * 6 * 4 * 8


def test_omega_is_standard_gaussian_drawn_once_and_follows_the_seed():
    before = th.get_rng_state()
    sketch = ready(0.9, d=400, m=50, seed=3)
    omega = sketch.omega
    sketch.draw_once()
    assert sketch.omega is omega
    assert omega.mean().item() == pytest.approx(0.0, abs=0.03)
    assert omega.std().item() == pytest.approx(1.0, abs=0.03)
    assert th.equal(omega, ready(0.9, d=400, m=50, seed=3).omega)
    assert not th.equal(omega, ready(0.9, d=400, m=50, seed=4).omega)
    # the global generator is left alone
    assert th.equal(before, th.get_rng_state())


SAME_NUMBER = "but now there are other parameters of the same number"


@pytest.mark.parametrize(
    ("layout", "m", "now"), [([4, 3], 4, "d=7 and m=4"), ([4, 2], 5, "d=6 and m=5"), ([2, 4], 4, SAME_NUMBER)]
)
def test_other_parameters_or_projections_start_afresh_with_a_warning(layout, m, now):
    sketch = ready(0.9)
    sketch.adapt(th.tensor([4, 2]), 4, 0.9, th.float64)
    sketch.draw_once()
    sketch.update(sketch.omega.clone(), sketch.omega, 1.0)
    with pytest.warns(UserWarning, match=f"d=6 actor parameters and m=4 projections, .*{now}"):
        sketch.adapt(th.tensor(layout), m, 0.9, th.float64)
    assert sketch.omega.numel() == 0
    sketch.draw_once()
    assert sketch.omega.shape == (sum(layout), m)
    assert not sketch.y_fisher.any()
    assert sketch.ema_weight.item() == 0.0


def test_a_cleared_sketch_starts_afresh_without_a_warning_and_with_another_omega():
    sketch = ready(0.9)
    old = sketch.omega
    sketch.update(old, old, 1.0)
    sketch.clear()
    assert sum(value.numel() for key, value in sketch.state_dict().items() if key != "generator") == 1
    sketch.adapt(th.tensor([1, 5]), 4, 0.9, th.float64)
    sketch.draw_once()
    assert sketch.omega.shape == old.shape
    assert not th.equal(sketch.omega, old)
    assert not sketch.y_fisher.any()
    assert sketch.ema_weight.item() == 0.0


def test_state_survives_and_goes_on_identically():
    one = ready(0.9)
    one.update(one.omega, 2 * one.omega, 0.1)
    other = Sketch(6, 4, 0.9, 99, th.float64, CPU)
    other.load_state_dict(one.state_dict())
    assert other.omega.stride() == one.omega.stride()
    assert th.equal(one.update(one.omega, one.omega, 0.2), other.update(other.omega, other.omega, 0.2))
    for sketch in (one, other):
        with pytest.warns(UserWarning, match="starts afresh"):
            sketch.adapt(th.tensor([8]), 4, 0.9, th.float64)
        sketch.draw_once()
    assert th.equal(one.omega, other.omega)


def test_an_empty_state_survives():
    one, other = (Sketch(6, 4, 0.9, seed, th.float64, CPU) for seed in (0, 1))
    other.load_state_dict(one.state_dict())
    for sketch in (one, other):
        sketch.draw_once()
    assert th.equal(one.omega, other.omega)


@pytest.mark.parametrize("shape", [(6, 5), (7, 4)])
def test_a_state_of_another_shape_waits_for_the_update(shape):
    """Which parameters are frozen is not saved, so d and m can be judged only where the parameters are known."""
    one, other = ready(0.9), ready(0.9, *shape)
    other.load_state_dict(one.state_dict())
    assert other.shape == (6, 4)
    assert th.equal(other.omega, one.omega)


@pytest.mark.parametrize("betas", [(0.9, 0.0), (0.0, 0.9)])
def test_averages_are_dropped_where_the_other_side_has_none(betas):
    one, other = (ready(beta, seed=i) for i, beta in enumerate(betas))
    one.update(one.omega.clone(), one.omega, 1.0)
    other.load_state_dict(one.state_dict())
    assert th.equal(other.omega, one.omega)
    assert other.y_fisher.shape == ((6, 4) if betas[1] else (0, 0))
    assert other.ema_weight.item() == 0.0
    found = other.update(other.omega.clone(), other.omega, 1.0)
    assert found.numpy() == pytest.approx(2 * other.omega.numpy())


def test_strict_loading_wants_every_entry():
    sketch = ready(0.9)
    state = sketch.state_dict()
    assert [key for key, value in state.items() if not value.is_floating_point()] == [list(state)[-1]]
    del state["y_fisher"]
    with pytest.raises(RuntimeError, match="y_fisher"):
        sketch.load_state_dict(state)
    sketch.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="surplus"):
        sketch.load_state_dict({**sketch.state_dict(), "surplus": th.zeros(1)})
