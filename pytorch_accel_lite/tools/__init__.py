"""Tools for extensions and callbacks, on top of the training loop. A run itself calls none of them."""
