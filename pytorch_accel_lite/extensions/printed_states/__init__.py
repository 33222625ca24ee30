"""Printing the contents of training states, as the command ``inspect`` does."""

from pytorch_accel_lite.extensions.printed_states.state_listing import print_contents

__all__ = ["print_contents"]
