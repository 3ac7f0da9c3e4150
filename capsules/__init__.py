"""The application: the command line, scene files, and the experiments of the paper."""
