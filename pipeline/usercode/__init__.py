"""The user's own Python, run in a child process.

The child is :mod:`pipeline.usercode.start`, started by its path. It imports the standard library, numpy and torch,
never this project, and puts the user's directory first on ``sys.path``: a user's own ``pipeline`` or ``plugins`` module
is the one that the user's code gets. Memory that torch took is given back when the child ends.
"""

from pipeline.usercode.process import UserProcess
from pipeline.usercode.spec import CodeSpec, parse_code

__all__ = ["CodeSpec", "UserProcess", "parse_code"]
