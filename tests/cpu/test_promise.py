"""What promises.md says of numbers of tokens."""

from pathlib import Path
from typing import Any

import torch

from twell.choose import tuning


def test_the_number_of_tokens_chooses_kernels_where_readme_says() -> None:
    def kernels(m: int, k: int) -> tuple[Any, ...]:
        return (
            # tiles of all sizes give the same bits
            tuning.decode(torch.bfloat16, m, k, "gated") or tuning.gate_pack(torch.bfloat16, m, 5632, 66).op,
            tuning.up_down_token(torch.bfloat16, m, k, True),
        )

    changes = {m for k in (64, 2048, 4096, 8192, 16384) for m in range(1, 3000) if kernels(m, k) != kernels(m + 1, k)}
    *some, last = sorted(changes)
    page = (Path(__file__).resolve().parents[2] / "docs" / "promises.md").read_text()
    assert f"they change above {', '.join(f'{m:,}' for m in some)} and {last:,} tokens" in page
