"""Tools for use around a run: finding settings, measuring, replaying a step. The core does not depend on them."""
