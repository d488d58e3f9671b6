"""Modules around ``twell.call.functional``, with the parameters of ``nn.Linear`` children."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from twell.base.activation import Activation, ActivationName
from twell.base.arguments import require_integer
from twell.call import autograd, execution, functional
from twell.call import plain as _plain
from twell.call.execution import Aux
from twell.call.functional import Strategy
from twell.choose.plan import Facts, routed
from twell.choose.site import AutoStrategy, Screen
from twell.nn import adapted, projections
from twell.nn import down_layout as _down_layout
from twell.nn.projections import Projection
from twell.nn.record import watch
from twell.nn.settings import Configured, name_of, setting
from twell.ops.calls import How, known
from twell.ops.operands import Layer
from twell.runtime import modes
from twell.runtime.log import warn_once

if TYPE_CHECKING:
    from typing_extensions import Self

DownLayout = Literal["auto", "rows", "linear"]

# the names of projections
GATED = ("gate_proj", "up_proj", "down_proj")
PLAIN = GATED[1:]


class SparseFFN(Configured):
    """Base of both modules: their settings, and the dense path through the children."""

    up_proj: nn.Linear
    down_proj: nn.Linear
    aux: Aux | None = None
    _settings = Configured._settings | {"down_layout", "accumulate_main_grad", "record_aux"}
    # the names of the children that are projections, in the order of calls
    _projections: tuple[str, ...] = GATED
    # ``own_code`` of those of other classes that were seen to compute the same, and whether weights are cast as x is
    _linears: tuple[Any, ...] = ()
    _casts = False
    # the name of a child that drops values of the hidden state, "" without one
    _dropout = ""
    # dropouts elsewhere, children or shares, which were 0 when the layer was made of a module
    _still: tuple[str, ...] = ()
    # whether other code makes the gate, and whether other code applies the activation
    _given = _fixed = False
    _laid: _down_layout.Laid
    _accumulate_main_grad: bool
    _record_aux: bool
    down_layout: DownLayout = setting("down_layout")
    accumulate_main_grad: bool = setting("accumulate_main_grad")
    record_aux: bool = setting("record_aux")

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        bias: bool = False,
        *,
        compression: int = 8,
        strategy: Strategy | AutoStrategy = "auto",
        screen: Screen | None = None,
        invariant: bool = False,
        activation: ActivationName = "relu",
        threshold: float = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating torch.dtype, got {dtype!r}")
        require_integer("hidden", hidden, 1)
        require_integer("intermediate", intermediate, 1)
        routed(Facts(type(self).__name__, name_of(strategy), invariant, n=intermediate, k=hidden, sliced=True))
        self.hidden, self.intermediate = hidden, intermediate
        # how many children there were when all were last looked at
        self._children = 0
        self.compression, self.strategy, self.invariant = compression, strategy, invariant
        self.activation = activation
        self.threshold = threshold
        self.accumulate_main_grad, self.record_aux, self.down_layout = False, False, "auto"
        self._laid = _down_layout.Laid()
        self._auto = AutoStrategy()
        self._how = self._asked()
        watch()
        if screen is not None:
            self.screen = screen
        # load_state_dict(assign=True) replaces parameters stored by rows with contiguous tensors
        self.register_load_state_dict_post_hook(_keep_rows)  # type: ignore[no-untyped-call]
        self._add_projections(bias, device, dtype)

    def _add_projections(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        for name in self._projections:
            sizes = (self.intermediate, self.hidden) if name == "down_proj" else (self.hidden, self.intermediate)
            setattr(self, name, nn.Linear(*sizes, bias, device, dtype))

    def _require(self, name: str, value: Any) -> None:
        if name in ("activation", "threshold") and self._fixed and value != self.__dict__.get(f"_{name}", value):
            why = "since the model's own code applies the activation"
            raise ValueError(f"{name} must be as it is, {why}, got {value!r}")
        if name == "down_layout":
            require_layout(name, value)
        else:
            super()._require(name, value)

    def reset_parameters(self) -> None:
        """Initialise all projections again, each as nn.Linear does."""
        # random numbers are drawn in the order of memory
        self._laid.put_back()
        for name in self._projections:
            if name in self._modules:
                getattr(self, name).reset_parameters()

    def extra_repr(self) -> str:
        form = "" if self.activation == "relu" else f", activation={self.activation!r}"
        threshold = "a tensor" if isinstance(self.threshold, Tensor) else self.threshold
        form += f", threshold={threshold}" if threshold else ""
        form += "" if self.screen == "auto" else f", screen={self.screen!r}"
        form += ", invariant=True" if self.invariant else ""
        return f"{self.hidden}, {self.intermediate}, compression={self.compression}, strategy={self.strategy!r}{form}"

    def __getstate__(self) -> dict[str, Any]:
        # Aux may be part of autograd's graph, which can neither be copied nor pickled
        self._laid.put_back()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_laid": _down_layout.Laid(), "_children": 0})

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``. Listings of parameters come by here, and get the down weight as nn.Linear stores it."""
        down = self.down_proj
        for name, module in super().named_modules(*args, **options):
            if module is down:
                self._laid.put_back()
            yield name, module
        # a child that other layers have, too, may have been listed with them
        self._laid.put_back()

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._laid.put_back()
        return super().named_parameters(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self._laid.put_back()
        return super().state_dict(*args, **options)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._laid.put_back()
        self._laid.fresh = True
        return super().train(mode)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self._laid.put_back()
        return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._laid.put_back()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @overload
    def forward(self, x: Tensor, return_aux: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_aux: Literal[True]) -> tuple[Tensor, Aux]: ...
    def forward(self, x: Tensor, return_aux: bool = False) -> Tensor | tuple[Tensor, Aux]:
        """x [..., hidden] -> y [..., hidden], with ``Aux(l1, l0)`` if asked for."""
        if self._still:
            self._require_still()
        if self._dropout and self._drops():
            return self._finish(self._dropped(x, return_aux or self._record_aux), return_aux)  # type: ignore[no-any-return]
        with_aux, compiling = return_aux or self._record_aux, modes.compiling()
        # all settings of a call are of one moment; a threshold that is a tensor is looked at
        how = self._asked() if compiling or isinstance(self._threshold, Tensor) else self._how
        if not (compiling or with_aux or self._accumulate_main_grad) and (y := self._known(x, how)) is not None:
            return y
        plain = self._is_plain()
        if not (plain or self._given):
            _down_layout.note_capture(self)
            return self._finish(self._adapted(x, with_aux), return_aux)  # type: ignore[no-any-return]
        lock = None if compiling else _down_layout.lock_of(self)
        with lock or contextlib.nullcontext():
            if lock:
                _down_layout.settle(self)
            result = self._sparse(x, with_aux, how) if plain else self._adapted(x, with_aux)
        return self._finish(result, return_aux)  # type: ignore[no-any-return]

    def _known(self, x: Any, how: How) -> Tensor | None:
        """y of a call of a kind that was made before; None, with nothing run, of any other.

        It asks what no memory of calls can: whether calling each projection is F.linear with its parameters and nothing
        else, and whether the down weight lies as it should.
        """
        children = self._modules
        # one that was set beside a projection may take its role
        if not isinstance(x, Tensor) or len(children) != self._children:
            return None
        operands: list[Tensor | None] = [x]
        biases: list[Tensor | None] = []
        for name in self._projections:
            child = children.get(name)
            if type(child) is not nn.Linear:
                return None
            own = child.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return None
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return None
            parameters = own["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if len(parameters) != 2 or type(weight) is not nn.Parameter or not weight.is_cuda:
                return None
            if "forward" in own or "weight" in own or "bias" in own:
                return None
            operands.append(weight)
            biases.append(bias)
        if any(_plain.HOOKS_OF_ALL) or not _plain.calls_are_torchs():
            return None
        if not self._gated:
            operands.insert(2, None)
            biases.insert(1, None)
        laid = self._laid
        with laid.lock:
            if self._down_layout == "auto":
                # a gradient is to be laid out as the weight is without twell
                trains = laid.weight is not None and torch.is_grad_enabled()
                if laid.fresh or (trains and any(t.requires_grad for t in (*operands, *biases) if t is not None)):
                    return None
                laid.note_reading(weight)
            return known((*operands, *biases), how)

    def _sparse(self, x: Tensor, with_aux: bool, how: How) -> Any:
        found = list(self._operands())
        weights, biases = [weight for weight, _ in found], [bias for _, bias in found]
        mains: list[Tensor | None] | None = None
        given: list[Any] = list(weights)
        if self._accumulate_main_grad:
            mains = self._main_grads(**dict(zip(GATED if self._gated else PLAIN, weights)))
            # backward adds to their mains, and such as tell the parameters so that want to know
            given = list(map(autograd.announced, weights, self._owners(*weights)))
        extra = execution.NOTHING
        if self._casts and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != weights[0].dtype:
            extra = execution.Extra(execution.Made(weights[0], 0, None))
            given, biases = _plain.cast(given, x.dtype), _plain.cast(biases, x.dtype)
        if not self._gated:
            given.insert(1, None)
            biases.insert(1, None)
        function = functional.sparse_gated_ffn if self._gated else functional.sparse_ffn
        if not modes.compiling():
            self.__dict__["_children"] = len(self._modules)
        return functional.run(function, Layer(x, *given, *biases), how, mains, with_aux, extra)

    def _operands(self) -> Iterable[tuple[Tensor, Tensor | None]]:
        return map(self._applied, self._projections)

    def _planned(self, weight: Tensor, training: bool) -> Any:
        """How calls that read this down weight run, whatever they meet."""
        dtype = modes.product_dtype(weight.dtype, weight.device.type)
        return adapted.planned(self, weight.shape[1], weight.shape[0], dtype, weight.device, training)

    def _finish(self, result: tuple[Tensor, Aux] | Tensor, return_aux: bool) -> Any:
        """The return value of ``forward``, from that of the function."""
        # a setting may have changed meanwhile
        if isinstance(result, tuple) and self._record_aux:
            self.aux = result[1]
        return result[0] if isinstance(result, tuple) and not return_aux else result

    def _is_plain(self) -> bool:
        """Whether calling the projections applies their weights and biases and does nothing else."""
        if any(_plain.HOOKS_OF_ALL) or not _plain.calls_are_torchs():
            return False
        children = (child for name, child in self._modules.items() if name in self._projections)
        return all(child is not None and _plain.is_plain(child, self._linears) for child in children)

    def _project(self, name: str, x: Tensor) -> Any:
        return getattr(self, name)(x)

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        """The gate before its activation and the up projection; the latter and None in a layer without a gate."""
        return self._gate(x), self._project("up_proj", x) if self._gated else None

    def _gate(self, x: Tensor) -> Any:
        """The gate before its activation, by calling its projection, which may be more than a weight and a bias."""
        return self._project("gate_proj" if self._gated else "up_proj", x)

    def _readings(self) -> list[Projection | str]:
        """What the projections compute, of gate, up and down, or why only calls of them tell."""
        return [projections.read(self._modules.get(name)) for name in self._projections]

    def _refusal(self) -> str:
        """Why every call raises an error, for what was set on the layer or around it; "" if not so."""
        if not self.accumulate_main_grad or self._is_plain():
            return ""
        read = dict(zip(self._projections, self._readings()))
        odd = [name for name, found in read.items() if isinstance(found, str) or found.layer or found.dequantise]
        return f"accumulate_main_grad: expected plain nn.Linear projections, got others or hooks ({', '.join(odd)})"

    def _adapted(self, x: Tensor, with_aux: bool) -> Any:
        """The result where a projection is more than a weight and a bias: sparse if the others can be read."""
        if refusal := self._refusal():
            raise NotImplementedError(refusal)
        routed(Facts(strategy=name_of(self.strategy), invariant=self.invariant, called=True))
        result = adapted.run(self, x, with_aux)
        if not isinstance(result, str):
            return result
        if result and not modes.compiling():
            warn_once(f"a twell layer calls its projections and runs dense: {result}")
        return self._dense(*self._pre_activations(x), with_aux)

    def _require_still(self) -> None:
        for name in self._still:
            each: Any = getattr(self, name, 0)
            # code may leave out whether it trains
            if p := (each.p if self.training else 0) if isinstance(each, nn.Dropout) else each:
                when = "when sparsify_ made a layer of its module, whose code is gone"
                raise NotImplementedError(f"{name} must drop nothing, as {when}, got p = {p}: set it before sparsify_")

    def _drops(self) -> bool:
        """Whether the hidden state passes through something that may change it now."""
        child: Any = self._modules[self._dropout]
        own = type(child) in (nn.Dropout, nn.Identity) and _plain.runs_its_class(child)
        return not own or (child.training and bool(self._dropped_by()))

    def _dropped_by(self, _: nn.Module | None = None) -> str:
        """What drops values of the hidden state in training, of a pair in its block; "" if nothing."""
        p = getattr(self._modules[self._dropout], "p", 0) if self._dropout else 0
        return f"{self._dropout}, p = {p}" if p else ""

    def _dropped(self, x: Tensor, with_aux: bool) -> Any:
        """The result where values of the hidden state are dropped."""
        if self._accumulate_main_grad or self._invariant:
            got = f"{self._dropped_by()}, in training: set it to 0"
            what = "accumulate_main_grad and invariant: expected a hidden state of which nothing is dropped"
            raise NotImplementedError(f"{what}, got {got}")
        return self._dense(*self._pre_activations(x), with_aux)

    def _dense(self, gate: Any, up: Any, with_aux: bool) -> Any:
        """The result by calling the projections, of what those before the activation returned."""
        activation = self._form()
        y, hidden, gate = self._behind(gate, up, activation)
        return (y, execution.dense_aux(hidden, gate, activation)) if with_aux else y

    def _behind(self, gate: Any, up: Any, activation: Activation) -> tuple[Any, Any, Any]:
        """y, the hidden state and the gate, of what the projections before the activation returned."""
        gate = activation.after(gate)
        hidden = activation.hidden(gate, up)
        kept = hidden
        if self._dropout:
            child = getattr(self, self._dropout)
            # a copy: figures are of the whole hidden state
            kept = child(hidden.clone() if getattr(child, "inplace", False) else hidden)
        return self._project("down_proj", kept), hidden, gate

    def _applied(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that calling a projection applies."""
        # a look-up of nn.Module costs a microsecond, and a layer without gradients makes nine of them
        children: Any = self._modules
        child = children[name] if name in children else getattr(self, name)
        parameters = child._parameters
        if "weight" in parameters and "bias" in parameters:
            return parameters["weight"], parameters["bias"]
        return child.weight, child.bias

    def _main_grads(self, **weights: Tensor) -> list[Tensor | None]:
        """``weight.main_grad`` of each projection whose weight requires grad."""
        mains = {name: getattr(t, "main_grad", None) if t.requires_grad else None for name, t in weights.items()}
        for name, weight in weights.items():
            if mains[name] is None and weight.requires_grad:
                expected = f"{name}.weight.main_grad must be a float32 tensor {list(weight.shape)}"
                raise ValueError(f"accumulate_main_grad: {expected}, got none")
        return list(mains.values())

    def _owners(self, *weights: Tensor) -> tuple[Tensor, ...]:
        return weights

    @classmethod
    def _of(cls, inputs: dict[str, nn.Linear], down: nn.Linear, **options: Any) -> Self:
        """A module with the Parameter objects of linear layers that form one FFN."""
        if given := [name for name in ("hidden", "intermediate", "bias", "device", "dtype") if name in options]:
            raise TypeError(f"from_linear takes no {given[0]}, which is that of the linear layers")
        mlp = cls(*projections.sizes_of(inputs, down), device="meta", **options)
        for name, linear in zip(cls._projections, (*inputs.values(), down)):
            child = mlp.get_submodule(name)
            child.weight, child.bias = linear.weight, linear.bias
        return mlp


class SparseGatedMLP(SparseFFN):
    """``down_proj(relu(gate_proj(x)) * up_proj(x))`` through ``twell.sparse_gated_ffn`` on x [..., hidden].

    ``gate_proj``, ``up_proj`` [intermediate, hidden] and ``down_proj`` [hidden, intermediate] are ``nn.Linear``
    children with their usual initialisation, names, shapes and layout; each has a ``bias`` if asked for. On a GPU the
    kernels read ``down_proj.weight`` by rows of neurons: for inference the layer stores it so while nothing else holds
    it (``twell.nn.set_down_layout``); training copies it at each call.

    With ``record_aux = True`` each call leaves its ``Aux`` in ``aux``, for models whose code passes on y alone. It is
    part of autograd's graph: set ``aux`` to None after reading it. Copies and pickles leave it out.

    The kernels read the weights and biases; the projections themselves are not called. LoRA adapters of peft and some
    quantised weights are read, too, and a gate projection that is anything else is called (docs/models.md); "auto"
    does so from 1,024 tokens on. If another projection has hooks (its own or global ones, as FLOP counters register),
    weights of a subclass or a replaced ``forward``, the layer warns, calls its projections and runs dense. In all these
    cases ``invariant`` and ``accumulate_main_grad`` raise NotImplementedError.

    ``compression``, ``strategy``, ``invariant``, ``activation`` and ``threshold`` are those of
    ``twell.sparse_gated_ffn`` and may be set at any time, the threshold to a tensor, too; the state dict holds none of
    them. With "auto" the module has its own ``AutoStrategy``, which chooses by the sparsity measured in earlier calls;
    ``twell.explain`` shows it. ``screen``, "auto" or "off", is its, or that of an ``AutoStrategy`` given as
    ``strategy``; None leaves it. A named strategy stays, except that float32 and float64 run dense.

    With ``accumulate_main_grad = True`` backward adds the gradient of each weight to ``weight.main_grad``, a float32
    tensor of the weight's shape that the trainer provides, and leaves ``weight.grad`` alone. A weight that has
    ``grad_added_to_main_grad``, as Megatron's have, gets True there and a gradient of zeros, so that its hooks run;
    compiled graphs set it as they begin.
    """

    gate_proj: nn.Linear
    _gated = True

    @classmethod
    def from_linear(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, **options: Any) -> Self:
        """Make a module that shares the Parameter objects of three ``nn.Linear``, each with or without bias.

        Their storage stays, too; ``options`` are the keyword arguments of the class from ``compression`` on. Raises
        TypeError or ValueError if the three do not form one FFN.
        """
        return cls._of({"gate": gate, "up": up}, down, **options)


class SparseMLP(SparseFFN):
    """``down_proj(relu(up_proj(x)))`` through ``twell.sparse_ffn``; all else as in ``SparseGatedMLP``."""

    _projections = PLAIN

    @classmethod
    def from_linear(cls, up: nn.Linear, down: nn.Linear, **options: Any) -> Self:
        """Make a module that shares the Parameter objects of two ``nn.Linear``, as ``SparseGatedMLP.from_linear``."""
        return cls._of({"up": up}, down, **options)


def require_layout(name: str, layout: object) -> None:
    if layout not in ("auto", "rows", "linear"):
        raise ValueError(f'{name} must be "auto", "rows" or "linear", got {layout!r}')


def _keep_rows(module: SparseFFN, incompatible_keys: Any) -> None:
    if module.down_layout == "rows" and isinstance(module.down_proj, nn.Linear):
        _down_layout.store(module.down_proj.weight, rows=True)
