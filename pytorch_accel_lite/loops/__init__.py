"""The loops: over epochs, steps and updates; over evaluation batches; over predictions."""
