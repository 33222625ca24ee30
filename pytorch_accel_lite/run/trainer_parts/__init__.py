"""What a trainer trains and holds: the prepared model, its optimizers and their parameters, and other attributes."""
