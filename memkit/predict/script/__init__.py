"""Run a whole script on a simulated GPU, in a process of its own."""
