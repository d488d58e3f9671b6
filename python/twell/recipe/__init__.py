"""The recipe of arXiv 2603.23198 for training sparse models, as plain functions.

::

    recipe.record_aux(model)
    tracker = recipe.SparsityTracker(model, every=100)
    for step, (ids, labels) in enumerate(batches):
        with tracker.watch(step):
            loss = cross_entropy(model(ids), labels)
        loss = loss + 2e-5 * recipe.l1_warmup(step, 600) * recipe.l1_term(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.reinitialize_dead(model, tracker.dead(), step=step)
        if step % 10 == 0:
            print(step, tracker.read().summary())

``TargetSparsity`` takes a number of non-zeros instead of a coefficient; ``TargetThreshold`` reaches it with FATReLU.

Under torch.compile: call ``record_aux`` and make the tracker before the first step. Activation checkpointing needs
``use_reentrant=False``, and inside a graph compiled with ``fullgraph=True`` also
``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``.
"""

from twell.recipe._aux import clear_aux, l1_warmup, layers, record_aux
from twell.recipe._reinitialize import reinitialize_dead, trained_layers
from twell.recipe._target import TargetSparsity, TargetThreshold
from twell.recipe._terms import l1_term
from twell.recipe._tracker import LayerStats, SparsityStats, SparsityTracker

__all__ = [
    "LayerStats",
    "SparsityStats",
    "SparsityTracker",
    "TargetSparsity",
    "TargetThreshold",
    "clear_aux",
    "l1_term",
    "l1_warmup",
    "layers",
    "record_aux",
    "reinitialize_dead",
    "trained_layers",
]
