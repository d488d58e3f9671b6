"""The table of seeded faults, and the tests that must find each."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_CHANGED = re.compile(r"\[-(.*?)-\](?:\{\+(.*?)\+\})?|\{\+(.*?)\+\}", re.DOTALL)


class Fault(NamedTuple):
    """A defect of one file.

    name: begins with the room. change: a text that must be there exactly once, with what goes as [-old-] and what comes
    as {+new+}, as ``git diff --word-diff`` has it. tests: arguments of pytest for the tests that must find it.
    """

    name: str
    file: str
    change: str
    tests: str

    @property
    def room(self) -> str:
        return self.name.partition(":")[0]

    @property
    def old(self) -> str:
        return _CHANGED.sub(lambda found: found[1] or "", self.change)

    @property
    def new(self) -> str:
        return _CHANGED.sub(lambda found: found[2] or found[3] or "", self.change)


def apply(fault: Fault, root: Path) -> str:
    """Put the fault into the tree at ``root``; return the text of the file before. ValueError unless it fits."""
    path = root / fault.file
    if not path.is_file():
        raise ValueError(f"{fault.name}: expected a file {fault.file}, got none")
    before = path.read_text(encoding="utf-8")
    if (count := before.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: expected its old text once in {fault.file}, got {count} times")
    if fault.old == fault.new:
        raise ValueError(f"{fault.name}: expected a new text that differs from the old one")
    path.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    return before


FAULTS = (
    # ---- kernels ----
    Fault(
        "kernels: rank without a barrier",
        "cute_kernels/all_gpus/rank.py",
        "counts.iterator + OWN * thread, 4))\n[-        cute.arch.sync_threads()\n-]",
        "tests/emulator/test_kernels.py -k popularity",
    ),
    Fault(
        "kernels: last token tile has all rows",
        "cute_kernels/all_gpus/compact_ranges.py",
        "pairs = Int32([-cutlass.min(Int64(stats.shape[0]) * stats.shape[1] - first, Int64(pairs))-]{+pairs+})",
        "tests/emulator/test_kernels.py -k token_tiles",
    ),
    Fault(
        "kernels: column behind the last one",
        "cute_kernels/sm90/listed_rows.py",
        "if k * tile_k + piece * values <{+=+} o.w.shape[1] else Int32(0)",
        "tests/emulator/test_kernels.py -k up_projection",
    ),
    Fault(
        "kernels: two arrivals of a warp",
        "cute_kernels/sm90/ring.py",
        "    if lane [-== 0-]{+< 2+}:\n        cute.arch.mbarrier_arrive(ring.empty + state.index)",
        "tests/emulator/test_kernels.py -k up_projection",
    ),
    Fault(
        "kernels: row-tile that overflows by one is not spilled",
        "cute_kernels/sm90/gate_pack.py",
        "cute.arch.vote_ballot_sync(count >[-=-] o.width)",
        "tests/emulator/test_kernels.py -k gate_at_candidates",
    ),
    Fault(
        "kernels: next launch starts before the wait",
        "cute_kernels/sm90/sampled_gate.py",
        "        launch.[-wait-]{+start_next_early()\n        launch.griddepcontrol_wait+}()\n",
        "tests/cpu/test_launches.py",
    ),
    Fault(
        "kernels: over-full products begin before all parts are there",
        "cute_kernels/all_gpus/overflow.py",
        "                [-met = self.meet(o, s, met)\n                -]index = ",
        'tests/emulator/test_cases.py -k "too_many and 600"',
    ),
    # ---- programs ----
    Fault(
        "programs: stride of the last dimension is not compared",
        "host/program.c",
        "  for (int d = 0; d < tensor->ndim{+ - 1+}; d++)\n    if (tensor->shape[d] > 1 && tensor->strides[d]",
        "tests/cpu/test_host.py -k as_declared",
    ),
    Fault(
        "programs: view may end behind its tensor",
        "host/program.c",
        "(own && offset > room[- - own-])",
        "tests/cpu/test_host.py -k stays_in",
    ),
    # ---- formats ----
    Fault(
        "formats: full row-tile is spilled",
        "python/twell/ops/pack.py",
        "overflows = counts >{+=+} geometry.capacity(compression)",
        "tests/cases/test_cases.py -k pinned",
    ),
    Fault(
        "formats: unpack reads 15 bits of a neuron",
        "python/twell/ops/unpack.py",
        "(entry & [-0xFFFF-]{+0x7FFF+}).long()",
        'tests/cpu/test_ops.py tests/cpu/test_reference.py -k "reads_back or packed"',
    ),
    Fault(
        "formats: entries sorted by 12 bits of their place",
        "python/twell/ops/hybrid.py",
        "order = (run << [-13-]{+12+} | word).argsort()",
        "tests/cases/test_cases.py -k pinned",
    ),
    Fault(
        "formats: slice of more entries than fit",
        "cute_kernels/geometry.py",
        "most = [-max(1, UNION_ENTRIES // n // TOKEN_TILE-]{+(UNION_ENTRIES // n // TOKEN_TILE + 1+}) * TOKEN_TILE",
        "tests/cpu/test_ops.py -k slice",
    ),
    # ---- gradients ----
    Fault(
        "gradients: bias gradients swapped",
        "python/twell/call/autograd.py",
        "every = dx, dw_gate, dw_up, dw_down, [-db_gate, db_up-]{+db_up, db_gate+}",
        "tests/cases/test_cases.py -k pinned",
    ),
    Fault(
        "gradients: L1 gradient without the sign",
        "python/twell/ops/hybrid.py",
        "dl1 * hidden.sign(){+.abs()+}",
        "tests/cases/test_cases.py -k pinned",
    ),
    Fault(
        "gradients: main_grad overwritten",
        "python/twell/call/autograd.py",
        "ctx.main.[-add_-]{+copy_+}(gradient)",
        'tests/habits/test_habits.py -k "test_habit and mains"',
    ),
    Fault(
        "gradients: half the derivative of squared ReLU",
        "python/twell/base/activation.py",
        "d_gate = upstream * [-(2 * own)-]{+own+}",
        "tests/cases/test_cases.py -k pinned",
    ),
    # ---- auto ----
    Fault(
        "auto: change without a margin",
        "python/twell/choose/rates.py",
        "predicted[best] > (1 [---]{+++} MARGIN) * predicted[current]:",
        'tests/cpu/test_auto.py -k "decides_by or two_percent"',
    ),
    Fault(
        "auto: union of a partial tile counts as one of a whole",
        "python/twell/choose/site.py",
        "neurons = [-m // geometry.TOKEN_TILE-]{+-(-m // geometry.TOKEN_TILE)+} * n",
        'tests/cpu/test_auto.py -k "measures_what or measures_the"',
    ),
    Fault(
        "auto: captured call is measured",
        "python/twell/choose/site.py",
        "if not real or [-capturing or -]not self.heeds(x)",
        "tests/cpu/test_auto.py tests/cpu/test_auto_graphs.py -k captur",
    ),
    Fault(
        "auto: a checkpoint takes a remembered route",
        "python/twell/choose/site.py",
        "if asks or [-holder is not None or -](training",
        "tests/cpu/test_auto.py -k keep_no_routes",
    ),
    Fault(
        "calls: a recomputation goes by memory",
        "python/twell/ops/calls.py",
        "if [-training and (modes.checkpointed() or modes.in_backward())-]{+False+}:",
        "tests/cpu/test_front.py -k checkpoint",
    ),
    Fault(
        "auto: times of e4m3 layers fit rates of 16 bits",
        "python/twell/commands/tune.py",
        '"e4m3": ("[-float8-]{+rates+}", _OTHERS)',
        "tests/cpu/test_tune.py -k made_the_times",
    ),
    Fault(
        "auto: a wrong time counts like any other",
        "python/twell/commands/tune.py",
        "yield [-math.copysign(_SCALE * math.sqrt(2 * (math.hypot(1, error / _SCALE) - 1)), error)-]{+error+}",
        "tests/cpu/test_tune.py -k made_the_times",
    ),
    Fault(
        "auto: rates are written of what was measured in part",
        "python/twell/commands/tune.py",
        "if [-done < len(steps)-]{+False+}:",
        "tests/cpu/test_tune.py -k measures_and_writes",
    ),
    # ---- sparsify ----
    Fault(
        "sparsify: any subclass of nn.Linear is taken",
        "python/twell/integrations/sparsify/candidates.py",
        "if not isinstance(linear, nn.Linear)[- or any(vars(base).keys() - _OF_LINEARS for base in own)-]:",
        "tests/cpu/test_sparsify_refusals.py -k hooks_or_state",
    ),
    Fault(
        "sparsify: pair loses its biases",
        "python/twell/nn/converted.py",
        'self.register_parameter("bias", [-linear.bias-]{+None+})',
        "tests/cpu/test_sparsify.py -k same_function",
    ),
    Fault(
        "sparsify: gradients are not compared",
        "python/twell/integrations/sparsify/equivalence.py",
        "    if [-setting.grad and roots-]{+False+}:",
        "tests/cpu/test_sparsify_refusals.py -k refused",
    ),
    Fault(
        "sparsify: large values are not tried",
        "python/twell/integrations/sparsify/equivalence.py",
        "[-    Setting(_F32, True, scale=1e5),\n-]",
        "tests/cpu/test_sparsify_refusals.py -k refused",
    ),
    Fault(
        "sparsify: a dropout of the hidden state is lost",
        "python/twell/integrations/sparsify/candidates.py",
        "alone=True, settings=MODES) and not differs(named, half, settings=MODES){+ and False+}:",
        "tests/cpu/test_sparsify_pairs.py -k whole_hidden_state",
    ),
    # ---- recipe ----
    Fault(
        "recipe: gates of tokens at the same places of all sequences",
        "python/twell/recipe/_inputs.py",
        "[- + part * (count // most) // most-]]",
        "tests/cpu/test_target.py -k same_places",
    ),
    Fault(
        "recipe: padding counts in the L1 term",
        "python/twell/recipe/_inputs.py",
        "return rows[-.index_select(0, self.places)-]",
        "tests/cpu/test_recipe.py tests/cpu/test_target.py -k padding",
    ),
    Fault(
        "recipe: warm-up one step ahead",
        "python/twell/recipe/_aux.py",
        "else (step {++ 1 +}- start) / warmup_steps",
        "tests/cpu/test_recipe.py -k warm",
    ),
    Fault(
        "recipe: dead neurons of an earlier step",
        "python/twell/recipe/_tracker.py",
        "self._closed, self._reduced, [-self._dead, -]self._fresh = torch.cat(flats), False, [-None, -]False",
        'tests/cpu/test_recipe_tracker.py tests/cpu/test_recipe.py -k "observed or revives"',
    ),
    # ---- loaders ----
    Fault(
        "loaders: OPT's layers from the tenth on are left as they are",
        "python/twell/integrations/layouts.py",
        r"decoder\.layers\.\d[-+-]\.fc2\.weight$",
        "tests/cpu/test_layouts.py -k names_of_down",
    ),
    Fault(
        "loaders: square down weights, perhaps by rows, are read as they are",
        "python/twell/integrations/layouts.py",
        "if [-linear == rows or -]list(shape) not in",
        "tests/cpu/test_transformers.py -k files_of_others_that_are_refused",
    ),
    # ---- refusals ----
    Fault(
        "refusals: another 16-bit dtype of a weight is not named",
        "python/twell/call/admission.py",
        "    if len({t.dtype{+.itemsize+} for t in operands.values()}) > 1:",
        "tests/habits/test_habits.py -k test_refusal",
    ),
    Fault(
        "refusals: main_grad that requires a gradient is taken",
        "python/twell/call/admission.py",
        "[-            and not main.requires_grad\n-]",
        "tests/habits/test_habits.py -k test_refusal",
    ),
    Fault(
        "refusals: layer without neurons is taken",
        "python/twell/choose/plan.py",
        "        if size [-== 0 or size -]% multiple:",
        'tests/habits/test_habits.py tests/cpu/test_ops.py -k "test_refusal or sizes"',
    ),
    Fault(
        "refusals: a transform is dense whatever was named",
        "python/twell/choose/plan.py",
        '    if asked[- == "auto"-]:\n        return Route("dense", reason="transforms',
        'tests/habits/test_habits.py -k "test_refusal and plan"',
    ),
    # ---- experts ----
    Fault(
        "experts: weight of a token's first expert for all",
        "python/twell/ops/experts.py",
        "weights[-.where(routed, 0).sum(1)[tokens-]{+[tokens, 0+}]",
        "tests/cases/test_cases.py -k pinned",
    ),
    # ---- e4m3 ----
    Fault(
        "e4m3: static scale of x is ignored",
        "python/twell/ops/e4m3.py",
        "quantize_tokens(x[-, scale-])",
        "tests/cases/test_cases.py -k pinned",
    ),
    # ---- thresholds ----
    Fault(
        "thresholds: upper end of a window counts",
        "python/twell/call/choice.py",
        "above.double() <{+=+} high",
        "tests/cases/test_cases.py -k pinned",
    ),
    # ---- adapters ----
    Fault(
        "adapters: scale of a low-rank product is 1",
        "python/twell/nn/projections.py",
        "b.shape[1], None, [-scale-]{+1+})",
        "tests/cpu/test_adapted.py -k errors_are",
    ),
    Fault(
        "adapters: sources are saved with what becomes of their parameters",
        "python/twell/nn/columns.py",
        "None if t is None else t[-.detach()-] for t in given",
        "tests/cpu/test_adapted.py -k parameters_of_forward",
    ),
    Fault(
        "adapters: copies of weights live until backward",
        "python/twell/nn/columns.py",
        "ctx.{+own = inputs[-7]\n        ctx.+}call, ctx.matrices, ctx.columns =",
        "tests/cpu/test_adapted.py -k no_copy",
    ),
    # ---- calls ----
    Fault(
        "calls: forward of a linear layer's own is not called",
        "python/twell/nn/layers.py",
        'if "[-forward" in own or "-]weight" in own',
        "tests/cpu/test_front.py -k more_than_a_product",
    ),
    # ---- serving ----
    Fault(
        "serving: idle step of a data-parallel rank is of requests",
        "python/twell/integrations/_vllm_auto.py",
        "plan.total_num_scheduled_tokens >{+=+} 0",
        "tests/cpu/test_vllm_plugin.py -k of_requests",
    ),
    Fault(
        "serving: figures of the whole layer for each rank",
        "python/twell/integrations/_vllm_auto.py",
        "Figures(nonzeros[- / share-], union)",
        "tests/cpu/test_vllm_plugin.py -k share_of_the_figures",
    ),
    # ---- saved models ----
    Fault(
        "saved models: threshold of an activation is 0",
        "python/twell/nn/configuration.py",
        "[-float(activation.threshold)-]{+0.0+}",
        "tests/cpu/test_transformers.py -k saved_as_it_is",
    ),
    Fault(
        "saved models: a key that other layers share is written",
        "python/twell/nn/configuration.py",
        "if other is [-not -]None and",
        "tests/cpu/test_transformers.py -k without_a_key_of_its",
    ),
    Fault(
        "saved models: layers that the record leaves out are taken",
        "python/twell/integrations/transformers.py",
        "[-any(entry.has(name) for entry in -]{+bool(+}mine)",
        "tests/cpu/test_transformers.py -k saved_as_it_is",
    ),
    # ---- analyze ----
    Fault(
        "analyze: tokens that wait for a whole tile are lost",
        "python/twell/integrations/analyze/figures.py",
        "block = [-torch.cat((self._waiting, pattern))-]{+pattern+}",
        "tests/cpu/test_analyze.py -k plain_loops",
    ),
    Fault(
        "analyze: a decoder's tokens of padding count",
        "python/twell/integrations/analyze/layers.py",
        'decoder = [-paired and "decoder" in at.name.split(".")-]{+False+}',
        "tests/cpu/test_analyze.py -k models_in_memory",
    ),
    Fault(
        "analyze: a verdict on e4m3 by what was measured in 16 bits",
        "python/twell/integrations/analyze/calls.py",
        'rates.MEASURED["[-e4m3" if each.float8 else "-]16 bits"]',
        "tests/cpu/test_analyze.py -k verdict",
    ),
    # ---- autoencoders ----
    Fault(
        "autoencoders: a call without tokens moves the threshold",
        "python/twell/nn/autoencoder.py",
        "self.threshold.copy_([-torch.where(least.isfinite(), moved, self.threshold)-]{+moved+})",
        "tests/cpu/test_autoencoder.py -k moving_threshold",
    ),
    Fault(
        "SAELens: codes that are read late have the thresholds of then",
        "python/twell/integrations/sae_lens.py",
        "self.threshold = sae.threshold[-.clone()-] if",
        "tests/neighbours/test_sae_lens.py -k training_steps",
    ),
)
