"""Triton kernels of the hot path on a GPU. Imported only where they are used; the plain torch code is always there, too.

Tensors are [B, height, width, channels] in memory and bf16 unless said otherwise; sums are float32. With
TRITON_INTERPRET=1 the same kernels run on the CPU, slowly: so they are tested.
"""
