"""Other systems to compare with; none of them is Bayesian, so none has an ELBO."""
