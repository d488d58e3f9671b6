"""How a call is made: checks of operands, the functions, autograd, sharded tensors and the routes that calls take."""
