"""Files of Gemma Scope (arXiv 2408.05147) and Gemma Scope 2: JumpReLU autoencoders and transcoders.

A file holds W_enc [d_in, d_sae], W_dec [d_sae, d_out], b_enc, threshold [d_sae] and b_dec [d_out]. Gemma Scope has
``params.npz``. Gemma Scope 2 has ``params.safetensors`` with small letters; its transcoders may have
``affine_skip_connection`` [d_in, d_out], too. None subtracts b_dec from x.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twell.base.arguments import require_path
from twell.call.functional import Strategy
from twell.choose.site import AutoStrategy
from twell.nn.layers import SparseAutoencoder

__all__ = ["load"]

_SKIP = "affine_skip_connection"
_NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")


def load(
    path: str | os.PathLike[str],
    *,
    strategy: Strategy | AutoStrategy = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SparseAutoencoder:
    """The autoencoder or transcoder of a ``.npz`` or ``.safetensors`` file, in ``eval`` mode.

    ``dtype`` is that of the file if not given; the threshold is float32. Raises ValueError for a file of other names or
    shapes, and for another ending.
    """
    require_path("path", path)
    tensors = {_name_of(name): tensor for name, tensor in _read(Path(path)).items()}
    expected = {*_NAMES}
    if not expected <= tensors.keys() <= expected | {"W_skip"}:
        raise ValueError(f"{path} must hold {', '.join(_NAMES)}, got {', '.join(sorted(tensors)) or 'nothing'}")
    if tensors["W_enc"].dim() != 2 or tensors["W_dec"].dim() != 2:
        shapes = list(tensors["W_enc"].shape), list(tensors["W_dec"].shape)
        raise ValueError(f"{path} must hold matrices W_enc and W_dec, got {shapes[0]} and {shapes[1]}")
    (d_in, d_sae), d_out = tensors["W_enc"].shape, tensors["W_dec"].shape[1]
    if "W_skip" in tensors:
        tensors["W_skip"] = tensors["W_skip"].t()
    sae = SparseAutoencoder(
        *(d_in, d_sae, d_out),
        activation="jumprelu",
        skip="W_skip" in tensors,
        apply_b_dec_to_input=False,
        strategy=strategy,
        device=device,
        dtype=tensors["W_enc"].dtype if dtype is None else dtype,
    )
    try:
        sae.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} must hold tensors of one autoencoder: {error}") from None
    return sae.eval()


def _read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    if path.suffix != ".npz":
        raise ValueError(f"path must end with .npz or .safetensors, got {path.name}")
    import numpy

    with numpy.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def _name_of(key: str) -> str:
    """The parameter of a key."""
    if key == _SKIP:
        return "W_skip"
    return f"W_{key[2:]}" if key.startswith("w_") else key
