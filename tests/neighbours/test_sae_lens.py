"""SAELens: the weights of a standard sparse autoencoder, given to ``twell.sparse_ffn``, compute its output."""

from __future__ import annotations

import pytest

pytest.importorskip("sae_lens")

import sae_lens
import torch

import twell


@pytest.mark.parametrize("strategy", ["union", "row", "dense"])
@pytest.mark.parametrize("centred", [True, False], ids=["minus b_dec", "x as it is"])
def test_a_relu_autoencoder_is_a_sparse_ffn(centred: bool, strategy: str) -> None:
    sae = sae_lens.StandardSAE(sae_lens.StandardSAEConfig(d_in=32, d_sae=256, apply_b_dec_to_input=centred))
    with torch.no_grad():
        for parameter in (sae.W_enc, sae.W_dec, sae.b_dec):
            parameter.normal_(std=0.2)
        # few features fire, as in a trained one
        sae.b_enc.normal_(mean=-1.0, std=0.2)
        x = torch.randn(3, 7, 32)
        active = sae.encode(x) > 0
        assert 0.01 < active.float().mean() < 0.3
        # the encoder may read x - b_dec: that is a part of its bias
        bias = sae.b_enc - sae.b_dec @ sae.W_enc if centred else sae.b_enc
        y = twell.sparse_ffn(x, sae.W_enc.T, sae.W_dec.T, b_up=bias, b_down=sae.b_dec, strategy=strategy)
        torch.testing.assert_close(y, sae(x), rtol=1e-4, atol=1e-5)
