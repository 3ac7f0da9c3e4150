"""The application: the command line, scene files, and the experiments of the paper."""

__version__ = "0.1.0"
