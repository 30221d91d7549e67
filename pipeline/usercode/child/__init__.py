"""What runs in the child process: standard library, numpy and torch only, and nothing of the rest of this project."""
