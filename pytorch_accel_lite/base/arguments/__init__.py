"""What users pass: checks of arguments and paths, and of the calls themselves."""
