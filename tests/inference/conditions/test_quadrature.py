"""Adaptive quadrature on integrals that are known."""

import numpy as np
import pytest

from inference.conditions.quadrature import Lattice


def integrate(lattice, log_integrand):
    """Run a lattice to its end; returns how many nodes were evaluated."""
    count = 0
    while nodes := lattice.wanted():
        count += len(nodes)
        lattice.learn(nodes, [log_integrand(*u) for u in lattice.place(nodes)])
    return count


@pytest.mark.parametrize("centre", [0.0, 3.7, -21.0])
@pytest.mark.parametrize("scale", [0.02, 0.4, 3.0])
def test_a_normal_wherever_it_is_and_however_narrow(centre, scale):
    lattice = Lattice([(-4.0, 4.0)], 1e-9)
    count = integrate(lattice, lambda u: -0.5 * ((u - centre) / scale) ** 2)
    assert lattice.stable and not lattice.endless
    np.testing.assert_allclose(
        lattice.log_integral, np.log(scale * np.sqrt(2 * np.pi)), rtol=0, atol=1e-9
    )
    assert count < 600


def test_two_peaks_and_a_skewed_one():
    def two(u):
        return np.logaddexp(-0.5 * ((u + 3) / 0.1) ** 2, -0.5 * ((u - 2) / 0.3) ** 2)

    lattice = Lattice([(-4.0, 4.0)], 1e-9)
    integrate(lattice, two)
    np.testing.assert_allclose(lattice.log_integral, np.log(0.4 * np.sqrt(2 * np.pi)), atol=1e-9)
    # Gamma(3, 1) in the logarithm of its variable: Gamma(3) = 2.
    lattice = Lattice([(-1.0, 1.0)], 1e-9)
    integrate(lattice, lambda u: 3 * u - np.exp(u))
    np.testing.assert_allclose(lattice.log_integral, np.log(2.0), atol=1e-9)


def test_two_correlated_variables():
    precision = np.array([[4.0, -3.0], [-3.0, 5.0]])
    lattice = Lattice([(-1.0, 1.0), (-1.0, 1.0)], 1e-9)

    def log_integrand(*u):
        shift = np.array(u) - [1.0, -2.0]
        return -0.5 * shift @ precision @ shift

    integrate(lattice, log_integrand)
    expected = np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(lattice.log_integral, expected, atol=1e-9)


def test_an_integrand_that_never_falls_off_is_noticed():
    lattice = Lattice([(-4.0, 4.0)], 1e-9)
    integrate(lattice, lambda u: 3.0 * u)
    assert lattice.endless


def test_an_integrand_that_is_nowhere_above_zero():
    lattice = Lattice([(-4.0, 4.0)], 1e-9)
    integrate(lattice, lambda u: -np.inf)
    assert lattice.finished and lattice.log_integral == -np.inf
