"""Interface to torch internals: every private or version-dependent torch name that memkit uses, and its purpose.

All names exist in torch 2.8, the oldest version that memkit is tested on, unless a line next to a name says which
tested versions lack it, and what memkit does without it. No other file of memkit uses a private part of torch.
"""

from memkit._torch.versions import warn_beyond_tested

warn_beyond_tested()  # runs once, since a module is imported once
