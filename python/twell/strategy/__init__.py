"""How a layer runs: the one ``plan``, measured costs, and the memory of call sites."""
