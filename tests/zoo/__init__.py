"""Networks for the tests: small builders, seeded, exported to ONNX by one helper.

``ZOO`` lists every network that the placement tests go through; ``build(name)`` returns one of them.
"""

from tests.zoo.export import export_onnx
from tests.zoo.registry import ZOO, ZooModel, build

__all__ = ["ZOO", "ZooModel", "build", "export_onnx"]
