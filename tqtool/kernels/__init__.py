"""GPU kernels of the packed trellis: which one fits a problem, how it is launched, its text, its call.

Without a device: ``problem`` (values), ``encoding`` (the encoder's), ``rules`` (reasons that all backends have),
``sources`` (text), ``metal_kernels`` (which kernels there are, ``supports``, launch geometry). With one: ``backend``
(calls, the same for every backend), ``encoder`` (the search, likewise), ``metal``, ``metal_encoder``, ``cuda``,
``cuda_encoder``; ``cuda_kernels`` needs none.
"""
