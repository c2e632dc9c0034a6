"""Which foreign kernels there are, what each of them does, and how calls of them are caught.

``table``: how a kernel is declared; ``transformer_engine`` and ``apex``: the declarations;
``objects``: quantised tensors and quantizers among arguments; ``seam``: where calls are caught.
How a call is executed a second time is the core's business: ``sparetrain_megatron.dmr.foreign``.
"""
