"""Markov chain Monte Carlo: Gibbs sampling and NUTS, with parallel tempering."""
