"""Modules of sparse layers, with the parameters of ``nn.Linear`` children; what sets or explains those of a model."""

from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import DownLayout, SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.models import explain, set_down_layout, set_strategy

__all__ = [
    "DownLayout",
    "Float8MLP",
    "SparseAutoencoder",
    "SparseFFN",
    "SparseGatedMLP",
    "SparseMLP",
    "explain",
    "set_down_layout",
    "set_strategy",
]
