"""Several optimizers, optimizers made by factories, and several updates or gradients in a step: loaded when used."""
