"""Further latent sites: list their values and sum or integrate over them."""
