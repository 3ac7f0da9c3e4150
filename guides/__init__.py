"""What is approximated: the mean-field family, its coordinate updates, its closed-form ELBO."""
