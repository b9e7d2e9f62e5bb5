"""Finds and reads the routed experts of transformers checkpoints and GGUF files, a subset at a time."""

from moeoffload.checkpoint.checkpoint import Checkpoint
from moeoffload.checkpoint.layout import BUILDING, ExpertLayer

__all__ = ["BUILDING", "Checkpoint", "ExpertLayer"]
