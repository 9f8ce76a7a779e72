"""The acceptance kit: memkit put into public training code by small patches, and compared with the code as it was."""
