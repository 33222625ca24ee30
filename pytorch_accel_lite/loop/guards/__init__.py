"""What notices mistakes before, during and after a run, and says what to do about them. Nothing here trains."""
