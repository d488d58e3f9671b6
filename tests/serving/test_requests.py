"""What vLLM runs by itself is no request: nothing of it is counted, measured or chosen by."""

from pathlib import Path

import pytest
from served import HEADS, ON_GPU, TWO_RANKS, Serve, checkpoint, needs_gpus


def test_graphs_with_and_without_twell_are_kept_apart() -> None:
    from vllm.config import DeviceConfig, VllmConfig

    from twell.integrations._vllm_model import tell_graphs_apart

    device = DeviceConfig("cpu")
    with_twell, without = (VllmConfig(device_config=device, additional_config={"a": 1}) for _ in range(2))
    tell_graphs_apart(with_twell)
    assert with_twell.additional_config["a"] == 1
    assert with_twell.compute_hash() != without.compute_hash()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["auto", "row"])
def test_two_ranks_on_two_gpus(strategy: str, tmp_path: Path, serve: Serve) -> None:
    needs_gpus(2)
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    served = serve(model, hf_overrides={"sparsity_strategy": strategy}, enforce_eager=False, **ON_GPU, **TWO_RANKS)
    assert served.layers
    alone = serve(model, plugin=False, model_impl="transformers", **ON_GPU)
    # sums of two halves round otherwise, which later tokens may show
    assert [tokens[0] for tokens in served.tokens] == [tokens[0] for tokens in alone.tokens]


@pytest.mark.gpu
@pytest.mark.parametrize("second", ["0", "1"], ids=["first runner", "second runner"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_no_choice_comes_from_the_start_of_an_engine(eager: bool, second: str, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    served = serve(model, enforce_eager=eager, variables={"VLLM_USE_V2_MODEL_RUNNER": second}, **ON_GPU)
    started = [row for layer in served.started for row in layer]
    # graphs choose when they are captured, by nothing that was counted
    assert bool(started) == (not eager)
    assert all((calls, nonzeros) == (0, None) for _, calls, nonzeros in started)
    counted = [row for layer in served.choices for row in layer if row[1]]
    assert counted
    assert all(nonzeros is not None for _, _, nonzeros in counted)
