"""For pickles of version 0.2, whose layers may name a kept int8 copy of their gate weight; layers drop it."""


class GateCopy:
    """What such a layer had; it holds nothing."""
