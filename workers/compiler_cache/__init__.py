"""Compiled kernels that outlive a run: restored before a process starts, published while it works.

Now and then after work that was done, and at the end of a run that is complete; never by a failure.
Best effort, by a child process with a deadline: a damaged archive is a miss, and neither a full
disk nor storage that hangs fails a run or holds it up for longer than that. What is shared is
machine code: whoever can write to the place can run code in the runs that read it.
"""
