"""Methods and arguments of the trainer that are no part of a run: communication, ``log()``, optimizer factories."""
