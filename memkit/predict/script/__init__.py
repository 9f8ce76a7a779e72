"""A whole script on a GPU that is not there, in a process of its own."""
