"""Numerics of matches: permanents, Sinkhorn scaling, assignments, small linear algebra."""
