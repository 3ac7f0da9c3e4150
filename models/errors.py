"""Errors that are sentences: what was given, what is required, what to do."""


class InputError(ValueError):
    """Something the user gave cannot be used. The command line prints it and exits with 2."""


class ConjugacyError(InputError):
    """A program's sites do not have the form that a closed-form method needs.

    Args:
        site: name of the site at fault.
        found: what the program has there.
        required: what the closed form needs there.
    """

    def __init__(self, site: str, found: str, required: str) -> None:
        self.site, self.found, self.required = site, found, required
        super().__init__(
            f"site {site!r}: found {found}, but the closed-form methods (ds, gmm, exact, map, "
            f"ransac, gibbs, svi with the mean-field guide) require {required}; edit the program, "
            "or use a method that takes any density (nuts, svi with guide='AutoNormal')"
        )
