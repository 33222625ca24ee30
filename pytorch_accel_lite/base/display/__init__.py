"""What users see as text: representations, numbers, errors, warnings, pages from templates."""
