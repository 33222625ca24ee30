"""Mixtures of datasets and of streams, each with a share of the samples, and weights that change."""

from pytorch_accel_lite.extensions.mixtures.mixture import Mixture, MixtureSampler
from pytorch_accel_lite.extensions.mixtures.mixture_stream import MixtureStream

__all__ = ["Mixture", "MixtureSampler", "MixtureStream"]
