"""Cases with their answers: those that are pinned, and drawn ones."""
