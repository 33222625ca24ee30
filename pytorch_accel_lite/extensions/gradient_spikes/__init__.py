"""Skipping updates whose gradients are unusually large."""

from pytorch_accel_lite.extensions.gradient_spikes.gradient_spike_callback import GradientSpikeCallback

__all__ = ["GradientSpikeCallback"]
