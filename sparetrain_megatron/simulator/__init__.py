"""What protection would cost on a cluster: from a model's shape, a layout and a machine.

Knows neither torch nor a framework: it makes `Profile`s and has the planners of `plan` plan them.
"""
