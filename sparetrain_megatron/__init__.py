"""SpareTrain: every operator of a Megatron training step runs twice and is compared bit for bit."""

__version__ = "0.1.0"
