"""What a posterior is asked: densities, symmetries, a common frame, draws."""
