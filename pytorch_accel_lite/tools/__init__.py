"""Tools around a run: finding settings, measuring, trying again. The core does not need them."""
