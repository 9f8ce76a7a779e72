"""The seam to torch: each private or version-dependent name of it that memkit needs, with what it is for.

All names are in torch 2.8, the oldest version that memkit's tests run on, unless a line beside one says which of the
tested versions lack it, and what is done without it. No other file of memkit names a private part of torch.
"""

from memkit._torch.versions import warn_beyond_tested

warn_beyond_tested()  # once: a module is imported once
