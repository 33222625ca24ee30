"""What users see as text: representations, numbers, errors, warnings."""
