"""Metal kernels run without a Mac: the text that MLX would compile, compiled by g++ and executed, every lane a fibre.

What it finds beside wrong numbers: reads and writes outside a buffer; results never written, or written twice; SIMD
operations and barriers that not all lanes reach together; threadgroup memory above 32 KB, read before it is written,
or shared between lanes without a barrier; shifts by 32 and signed overflow. What it cannot say: whether Apple's
compiler takes the text, the order in which the hardware adds within a SIMD group, fast-math, speed.
"""
