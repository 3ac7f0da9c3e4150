"""Files of scenes and points."""
