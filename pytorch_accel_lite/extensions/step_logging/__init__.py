"""Rows of numbers every n updates: what metrics files, trackers and loggers of users derive from."""

from pytorch_accel_lite.extensions.step_logging.step_logger_callback import StepLogger

__all__ = ["StepLogger"]
