"""Typed face of ``tqtool._native``, the C++ compiled from ``kernels/cpu``."""
