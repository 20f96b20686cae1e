"""One module or folder a command: what the command line and the Python API call."""
