"""The files of ROLL."""
