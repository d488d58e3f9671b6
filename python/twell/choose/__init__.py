"""How calls run: the route of a call, from facts, rates of a card, and figures that earlier calls left."""
