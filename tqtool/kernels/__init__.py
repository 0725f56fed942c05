"""GPU kernels of the packed trellis: which one fits a problem, how it is launched, its text, its call.

Without a device: ``problem`` (values), ``encoding`` (the encoder's), ``rules`` (reasons that all backends have),
``sources`` (text), ``metal_kernels`` (which kernels there are, ``supports``, launch geometry). With one: ``backend``
(calls, the same for every backend), ``metal``, ``metal_encoder``.
"""
