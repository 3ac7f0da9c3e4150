"""Sites that are summed over: sets of present objects, and the search among them."""
