"""Run Mixture-of-Experts models with their routed experts on other devices and machines."""

__version__ = "0.1.0"
