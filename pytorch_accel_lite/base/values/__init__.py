"""Values as plain data: nested data, numbers and texts, the bits of tensors."""
