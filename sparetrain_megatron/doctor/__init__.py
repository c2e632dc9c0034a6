"""`sparetrain doctor`: tries a training job before it is protected.

A short run of the user's own script tells which operators two executions of disagree on healthy
hardware, which are not protected, what would be refused, and what deterministic kernels cost.

    commands     the command: starts the runs, puts their findings together
    worker       one rank of such a run
    cures        which switch makes an operator reproducible
    diagnosis    what was found, as data and as tables
"""
