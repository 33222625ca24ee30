"""Muon for the matrices of a model, and AdamW for its other parameters."""

from pytorch_accel_lite.extensions.muon.muon import ParameterKinds, muon_with_adamw, split_parameters

__all__ = ["ParameterKinds", "muon_with_adamw", "split_parameters"]
