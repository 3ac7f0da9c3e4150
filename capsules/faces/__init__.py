"""The faces experiment: drawn part images, their appearance model, scenes and report."""
