"""Reference posteriors: small problems with their exact answers, to test an inference on.

    from capsules.reference import load, names

    problem = load("two-triangles")
    problem.program, problem.scene           # a NumPyro program and its data
    problem.log_evidence, problem.match_probs, problem.pose_mean, problem.partitions

Problems and numbers are in `posteriors.json`, in plain JSON as `schema.json` says.
`python -m capsules.reference` computes them again.
"""

from capsules.reference.registry import Reference, load, names

__all__ = ["Reference", "load", "names"]
