"""Other systems for comparison; none of them is Bayesian, so none has an ELBO."""
