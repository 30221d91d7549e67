"""Where Q/DQ pairs go: rules, the plan they make, and its insertion into the graph."""

from pipeline.placement.plan import ActivationPoint, NodeDecision, PlacementPlan, WeightPoint
from pipeline.placement.planner import make_plan

__all__ = ["ActivationPoint", "NodeDecision", "PlacementPlan", "WeightPoint", "make_plan"]
