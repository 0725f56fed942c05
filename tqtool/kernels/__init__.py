"""GPU kernels of the packed trellis: which one fits a problem, how it is launched, its text, its call.

``problem`` (values), ``sources`` (text) and one ``<backend>_kernels`` (which kernels there are, ``supports`` and launch
geometry) need no device; ``<backend>`` calls them.
"""
