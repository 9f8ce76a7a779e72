"""The seam to torch: each private or version-dependent name of it that memkit needs, with what it is for."""
