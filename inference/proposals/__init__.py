"""Proposals for inference: candidate objects, parses of a scene, and starts."""
