"""The module classes that ``sparsify_`` knows by name: a table of what their code does with their projections.

A class counts by its own name, in the package that defines it. A subclass elsewhere counts as its base if it has
nothing but an ``__init__`` of its own: with any method it may do something else.
"""

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

_TRANSFORMERS, _TORCH, _FLA = "transformers.models.", "torch.nn.modules.transformer", "fla.models."


class Known(NamedTuple):
    """What a class does with the children ``names``: (gate, up, down), (up, down) or (gate and up in one, down).

    attribute: of a pair within a block, the name of the activation; "" for a module that is a layer as a whole.
    dropouts: of a pair, what may drop values between the activation and the down projection: a module or its ``p``.
    steps: what makes the gate of its projection, in this order, children and methods of the class; if any, a layer
    whose attribute ``sparse`` is 0 makes no zeros. hidden: whether a block's own code squares the ReLU of
    the first for the second.
    """

    names: tuple[str, ...]
    attribute: str = ""
    dropouts: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    sparse: str = ""
    hidden: bool = False


# Modules of transformers that are a layer as a whole, by the ends of their names and by their children. Those that are
# more (a norm, a clamp, a factor, a residual) are found by trial.
_LAYER_ENDS = ("MLP", "Mlp", "MLPBlock", "FFN", "FeedForward", "FeedForwardNetwork", "ActDense", "SwiGLU")
_LAYERS = (
    *(("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"), ("gate_up_proj", "down_proj")),
    *(("up_proj", "down_proj"), ("fc1", "fc2"), ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h"), ("c_fc", "c_proj")),
    *(("linear1", "linear2"), ("lin1", "lin2"), ("fc_in", "fc_out")),
)

# fc2(dropout(activation(fc1(x)))) among other code of a block, which does nothing else with the hidden state and is not
# run: the layers | the activation | its dropouts | the package, and lines of the classes, some with their common end,
# with the package's folder where the name alone says little.
_PAIRS = """
fc1 fc2 | activation_fn | activation_dropout | transformers.models.
DabDetrDecoderLayerFFN GroundingDinoDeformableLayer MMGroundingDinoDeformableLayer MossTranscribeDiarizeAudioLayer
EncoderLayer: AudioFlamingo3 Autoformer Bart Blenderbot BlenderbotSmall Informer LED M2M100 MBart Marian
EncoderLayer: Mask2FormerPixelDecoder Mvp OneFormerPixelDecoder PLBart Pegasus PegasusX Qwen2Audio Speech2Text
EncoderLayer: TableTransformer TimeSeriesTransformer Voxtral Whisper fsmt.
DecoderLayer: Autoformer Bart BigBirdPegasus BioGpt Blenderbot BlenderbotSmall GroundingDino Informer LED M2M100
DecoderLayer: MBart MMGroundingDino Marian Musicgen MusicgenMelody Mvp PLBart PPFormulaNet Pegasus PegasusX Speech2Text
DecoderLayer: TableTransformer TimeSeriesTransformer TrOCR Whisper XGLM fsmt.
MLP: ConditionalDetr DeformableDetr Detr MaskFormerDetr PPDocLayoutV2 PPDocLayoutV3 PPDocLayoutV4 RTDetr RTDetrV2
fc1 fc2 | activation_fn | | transformers.models.
OPTDecoderLayer BigBirdPegasusEncoderLayer
AudioEncoderLayer: Qwen2_5Omni Qwen3ASR Qwen3OmniMoe
fc1 fc2 | activation_fn | dropout | transformers.models.
DabDetrEncoderLayer LwDetrMLP RfDetrMLP
fc1 fc2 | activation_fn | hidden_dropout | transformers.models.
FunAsrNanoMLP
fc1 fc2 | activation_fn | encoder_feedforward_dropout | transformers.models.
OmDetTurboEncoderLayer
fc1 fc2 | activation | dropout | transformers.models.
GroundingDinoTextEnhancerLayer MMGroundingDinoTextEnhancerLayer
linear1 linear2 | activation | dropout | transformers.models.
Sam2VideoMemoryAttentionLayer Sam3TrackerVideoMemoryAttentionLayer ZoeDepthTransformerEncoderLayer
linear1 linear2 | activation | dropout | torch.nn.modules.transformer
TransformerDecoderLayer TransformerEncoderLayer
key value | act_fn | | fla.models.
RWKV7FeedForward
intermediate.dense output.dense | intermediate.intermediate_act_fn | | transformers.models.
Layer: AlignText AltRoberta BertGeneration Bert BigBird BlipText BridgeTowerBertCross BridgeTowerText Bros Camembert
Layer: Canine ChineseCLIPText ClapAudio ClapText ConvBert DPTViT Data2VecText Data2VecVision Deberta DebertaV2 Dinat
Layer: DonutSwin Electra Ernie FNet Flava Git LayoutLM LayoutLMv2 LayoutLMv3 Lilt Longformer Luke Lxmert MPNet MarkupLM
Layer: MaskFormerSwin MegatronBert MobileViTTransformer Mra Nystromformer PPDocLayoutV2ReadingOrder RemBert RoCBert
Layer: RoFormer Roberta SEWD Splinter Swin2SR Swinv2 Tapas TvpEncode VideoMAE Vilt VisualBert XLMRoberta XLMRobertaXL
Layer: Yolos Yoso
"""


def _pairs() -> Iterator[tuple[tuple[str, str], Known]]:
    for line in _PAIRS.split("\n")[1:-1]:
        if "|" in line:
            names, activation, dropouts, root = (part.strip() for part in line.split("|"))
            known = Known(tuple(names.split()), activation, tuple(dropouts.split()))
            continue
        end, _, rest = line.rpartition(": ")
        for name in rest.split():
            yield (root, name + end), known


_PAIR_OF = dict(_pairs())

# Modules that make the zeros by code of their own.
_GIVEN = {
    "gemma3n.Gemma3nTextMLP": Known(
        ("gate_proj", "up_proj", "down_proj"), steps=("_gaussian_topk", "act_fn"), sparse="activation_sparsity"
    ),
    "rwkv.RwkvFeedForward": Known(("key", "value"), hidden=True),
}

# An nn.Sequential of Linear, activation and Linear that its owner calls as a whole.
_SEQUENCES = {"ctrl.EncoderLayer": "ffn"}
SEQUENCE = ("0", "2")

# Children of which a module of another class may be a layer; to say so is all that is done with it.
LIKELY = (*_LAYERS, ("linear_1", "linear_2"), ("w1", "w2"), ("w_1", "w_2"), ("intermediate.dense", "output.dense"))

# What the body of a class has that defines no method but __init__.
WITHOUT_METHODS = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate_func__", "__annotate__"}
    | {"__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
    | {"__abstractmethods__", "_abc_impl"}
)


def known_class(module: Any) -> tuple[str, str] | None:
    """The package root and the name, with its folder if it is a model's, of the known class that a module is of."""
    kind: Any
    for kind in type(module).__mro__:
        where = kind.__module__
        for root in (_TRANSFORMERS, _TORCH, _FLA):
            if where.startswith(root):
                # a method that someone put into the class is another one
                package = root.partition(".")[0]
                methods = [kind.forward, *(f for f in vars(kind).values() if isinstance(f, types.FunctionType))]
                own = all(str(f.__module__).partition(".")[0] in (package, "torch") for f in methods)
                folder = where.removeprefix(root).split(".")[0]
                return (root, f"{folder}.{kind.__name__}".removeprefix(".")) if own else None
        if not vars(kind).keys() <= WITHOUT_METHODS:
            return None
    return None


def known(module: nn.Module, names_of: Any) -> list[Known]:
    """What the table says of a module's class; several for a name that stands for several sets of children.

    names_of: a function that says whether the module has children of some names.
    """
    found = known_class(module)
    if found is None:
        return []
    root, name = found
    pair = _PAIR_OF.get(found) or _PAIR_OF.get((root, name.rpartition(".")[2]))
    if pair is not None:
        return [pair] if names_of(pair.names) else []
    if name in _GIVEN:
        return [_GIVEN[name]]
    if root == _TRANSFORMERS and name.endswith(_LAYER_ENDS):
        return [Known(names) for names in _LAYERS if names_of(names)][:1]
    return []


def known_sequence(module: nn.Module) -> str:
    """The name of a child that is an ``nn.Sequential`` of a layer alone, which this module calls as a whole; or ""."""
    found = known_class(module)
    return _SEQUENCES.get(found[1], "") if found else ""
