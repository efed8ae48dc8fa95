"""The experts' part of a mixture-of-experts layer: ``GroupedMLP``, and ``permute`` / ``unpermute`` around it."""

from .grouped_mlp import GroupedMLP
from .permute import Permutation, permute, unpermute

__all__ = ["GroupedMLP", "Permutation", "permute", "unpermute"]
