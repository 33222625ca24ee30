"""Names that users use: those of the trainer, those of other libraries, and suggestions for unknown ones."""
