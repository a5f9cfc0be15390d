"""Radius of the uncertainty set around the policy gradient estimate (paper, Lemma 2)."""

import math


def confidence_radius_squared(n_params: int, n_samples: int, confidence_alpha: float) -> float:
    r"""
    Squared radius of the ellipsoid that holds the true policy gradient with probability at least 1 - α.

    .. math:: R_n^2 = \frac{1}{n}\left(d + 2\sqrt{d\log(1/\alpha)} + 2\log(1/\alpha)\right)

    Dimensionless: lengths are measured in standard deviations of the gradient's samples.
    Source: Lemma 2 of the paper, from Hsu, Kakade and Zhang (2012), Theorem 2.1.

    :param n_params: d, number of actor parameters
    :param n_samples: n, number of independent samples behind the policy gradient estimate, at least 1
    :param confidence_alpha: α in (0, 1); the set misses the true gradient with probability at most α
    :return: R_n²
    """
    log_inverse_alpha = -math.log(confidence_alpha)
    return (n_params + 2.0 * math.sqrt(n_params * log_inverse_alpha) + 2.0 * log_inverse_alpha) / n_samples
