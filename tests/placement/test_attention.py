"""Masked attention: wherever the mask stands, both products stay float; what is no mask changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from pipeline import export, prepare
from pipeline.config import PlacementConfig, Profile
from pipeline.placement import make_plan
from tests.placement.numbers import assert_numbers
from tests.placement.tiny import Tiny, decision, pairs

LENGTH = 24
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
SHAPE = (2, 4, LENGTH, 32)

BEFORE = ("add", "add-causal", "add-infinity", "sub", "mul", "mul-causal", "where", "where-causal", "where-expanded",
          "added-where", "reshaped", "cast", "two-sums", "capped")  # fmt: skip
BEHIND = ("guard", "where-behind", "mul-behind", "renormalised")
NO_MASK = ("none", "scale", "shift", "bias", "per-head", "guard-alone", "nan-guard-before", "constant-mul")


class Block(Tiny):
    """softmax(q k^T) v with one kind of mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.constant("low", -1e9)
        self.constant("zero", 0.0)
        self.constant("causal", CAUSAL, bool)
        query, key, value = (self.input(name, "n", 4, LENGTH, 32) for name in ("q", "k", "v"))
        scores = self.op("MatMul", [query, self.op("Transpose", [key], "kt", perm=[0, 1, 3, 2])], "scores")
        scores = self.op("Mul", [scores, self.constant("factor", 0.17)], "scaled")
        scores = self.before(kind, scores)
        weights = self.op("Softmax", [scores], "weights", axis=-1)
        self.op("MatMul", [self.behind(kind, weights), value], "y")

    def mask(self, dtype: int = TensorProto.FLOAT) -> str:
        return self.input("mask", "n", 1, 1, LENGTH, dtype=dtype)

    def before(self, kind: str, scores: str) -> str:
        if kind == "add":
            return self.op("Add", [self.mask(), scores], "m")
        if kind in ("add-causal", "add-infinity"):
            low = -np.inf if kind == "add-infinity" else -1e4
            return self.op("Add", [scores, self.constant("triangle", np.where(CAUSAL, 0, low))], "m")
        if kind == "sub":
            return self.op("Sub", [scores, self.op("Mul", [self.mask(), self.constant("high", 1e4)], "far")], "m")
        if kind == "mul":
            return self.op("Mul", [scores, self.mask()], "m")
        if kind == "mul-causal":
            return self.op("Mul", [scores, self.constant("triangle", CAUSAL)], "m")
        if kind == "where":
            return self.op("Where", [self.mask(TensorProto.BOOL), scores, "low"], "m")
        if kind == "where-causal":
            return self.op("Where", ["causal", scores, "low"], "m")
        if kind == "where-expanded":
            everywhere = self.op("Expand", ["low", self.op("Shape", [scores], "shape")], "lows")
            return self.op("Where", ["causal", scores, everywhere], "m")
        if kind == "added-where":
            return self.op("Add", [scores, self.op("Where", [self.mask(TensorProto.BOOL), "zero", "low"], "w")], "m")
        if kind == "reshaped":
            self.constant("five", [-1, 2, 2, LENGTH, LENGTH], "int64")
            self.constant("four", [-1, 4, LENGTH, LENGTH], "int64")
            triangle = self.constant("triangle", np.where(CAUSAL, 0, -100.0))
            masked = self.op("Add", [self.op("Reshape", [scores, "five"], "grouped"), triangle], "m")
            return self.op("Reshape", [masked, "four"], "ungrouped")
        if kind == "cast":
            half = self.op("Cast", [scores], "half", to=TensorProto.DOUBLE)
            limit = self.constant("low64", -1e9, np.float64)
            masked = self.op("Where", ["causal", half, limit], "m")
            return self.op("Cast", [masked], "single", to=TensorProto.FLOAT)
        if kind == "two-sums":
            position = self.op("MatMul", ["q", self.input("p", "n", 4, 32, LENGTH)], "positions")
            return self.op("Add", [self.op("Add", [position, scores], "both"), self.mask()], "m")
        if kind == "capped":
            capped = self.op("Mul", [self.op("Tanh", [scores], "tanh"), self.constant("cap", 30.0)], "capped")
            return self.op("Where", ["causal", capped, "low"], "m")
        if kind == "scale":
            return self.op("Div", [scores, self.constant("temperature", 2.0)], "m")
        if kind == "shift":
            return self.op("Add", [scores, "low"], "m")
        if kind == "bias":
            return self.op("Add", [scores, self.weights("relative", 4, LENGTH, LENGTH)], "m")
        if kind == "per-head":
            return self.op("Mul", [scores, self.input("temperature", "n", 4, 1, 1)], "m")
        if kind == "constant-mul":
            return self.op("Mul", [scores, self.weights("learned", 1, 1, LENGTH)], "m")
        if kind == "nan-guard-before":
            return self.op("Where", [self.op("IsNaN", [scores], "isnan"), "zero", scores], "m")
        return scores

    def behind(self, kind: str, weights: str) -> str:
        if kind in ("guard", "guard-alone"):
            if kind == "guard":
                weights = self.op("Where", ["causal", weights, "zero"], "hidden")
            return self.op("Where", [self.op("IsNaN", [weights], "isnan"), "zero", weights], "guarded")
        if kind == "where-behind":
            return self.op("Where", [self.mask(TensorProto.BOOL), weights, "zero"], "hidden")
        if kind == "mul-behind":
            return self.op("Mul", [weights, self.mask()], "hidden")
        if kind == "renormalised":
            hidden = self.op("Mul", [weights, self.constant("triangle", CAUSAL)], "hidden")
            axes = self.constant("last", [-1], "int64")
            return self.op("Div", [hidden, self.op("ReduceSum", [hidden, axes], "total")], "renormal")
        return weights


@pytest.mark.parametrize("kind", [*BEFORE, *BEHIND])
def test_a_mask_anywhere_keeps_both_products_float(tmp_path: Path, kind: str) -> None:
    plan = Block(kind).plan(tmp_path, "y")
    assert pairs(plan) == {}
    products = [item.node for item in plan.decisions if item.op == "MatMul"]
    assert {decision(plan, node) for node in products} == {(False, "masked-attention")}
    assert len(products) == (3 if kind == "two-sums" else 2)
    assert all(item.rule != "default" for item in plan.decisions), "every node is explained"
    (reason,) = {item.reason for item in plan.decisions if item.rule == "masked-attention"}
    assert reason == "part of an attention with a mask: its fused kernel is a float one"


@pytest.mark.parametrize("kind", [*BEFORE, *BEHIND])
def test_with_the_rule_off_both_products_are_int8(tmp_path: Path, kind: str) -> None:
    plan = Block(kind).plan(tmp_path, "y", rules_off=("masked-attention",))
    assert decision(plan, "scores") == decision(plan, "y") == (True, "matmul-activations")


@pytest.mark.parametrize("kind", NO_MASK)
def test_what_is_no_mask_leaves_the_products_int8(tmp_path: Path, kind: str) -> None:
    plan = Block(kind).plan(tmp_path, "y")
    assert decision(plan, "scores") == decision(plan, "y") == (True, "matmul-activations")


def test_a_masked_softmax_without_products_on_both_sides_is_no_attention(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 32)
    logits = net.op("MatMul", [net.input("x", "n", 24, 32), "w"], "logits")
    masked = net.op("Add", [logits, net.input("mask", "n", 24, 32)], "masked")
    net.op("MatMul", [net.op("Softmax", [masked], "p"), net.input("z", "n", 32, 32)], "y")
    plan = net.plan(tmp_path, "y")
    assert decision(plan, "logits") == (True, "matmul")
    assert decision(plan, "y") == (True, "matmul-activations")


@pytest.mark.parametrize("kind", ["none", "where-causal", "guard", "two-sums"])
@pytest.mark.parametrize("off", [(), ("masked-attention",)])
def test_numbers(tmp_path: Path, kind: str, off: tuple[str, ...]) -> None:
    """The INT8 graph against PyTorch, node by node; with the rule in force it is the float graph, bit by bit."""
    net = Block(kind)
    path = net.save(tmp_path, "y")
    shapes = {"q": SHAPE, "k": SHAPE, "v": SHAPE, "mask": (2, 1, 1, LENGTH), "p": (2, 4, 32, LENGTH)}
    random = np.random.default_rng(0)
    feeds = {item.name: random.standard_normal(shapes[item.name]).astype(np.float32) for item in net.inputs}
    assert_numbers(path, tmp_path, feeds, off, exact=kind != "none" and not off)


NETWORK = '''
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend


class Layers(nn.Module):
    """Three attentions, masked as PyTorch's users mask them; the last one is not."""

    def __init__(self):
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("causal", torch.tril(torch.ones(32, 32, dtype=torch.bool)))

    def forward(self, x, m):
        for index, layer in enumerate(self.project):
            y = layer(x).view(x.shape[0], 32, 4, 16).transpose(1, 2)
            if index == 0:
                y = attend(y, y, y, attn_mask=(m > 0)[:, None, None, :])
            elif index == 1:
                y = attend(y, y, y, is_causal=True)
            elif index == 2:
                scores = y @ y.transpose(-1, -2) / 4
                lowest = torch.full_like(scores, torch.finfo(scores.dtype).min)
                y = torch.where(self.causal, scores, lowest).softmax(-1) @ y
            else:
                y = attend(y, y, y)
            x = x + y.transpose(1, 2).reshape(x.shape[0], 32, 64)
        return x


def net():
    torch.manual_seed(0)
    return Layers().eval(), (torch.randn(2, 32, 64), torch.ones(2, 32))
'''


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_as_pytorch_exports_it(tmp_path: Path, dynamic: bool) -> None:
    """A boolean mask (with its guard against NaN), is_causal, GPT-2's Where; only the unmasked one becomes INT8."""
    (tmp_path / "layers.py").write_text(NETWORK)
    profiles = (Profile.parse("x=1x32x64,2x32x64,4x32x64;m=1x32,2x32,4x32"),) if dynamic else ()
    spec = f"{tmp_path / 'layers.py'}:net"
    exported = export.run(spec, inputs=(), profiles=profiles, opset=17, folder=tmp_path / "export").model_path
    model = prepare.run(exported, folder=tmp_path / "prepare").model_path
    plan = make_plan(model, PlacementConfig())
    rules = [item.rule for item in plan.decisions if item.op == "MatMul" and item.rule != "matmul"]
    assert rules == ["masked-attention"] * 6 + ["matmul-activations"] * 2
    assert [item.node for item in plan.decisions if item.rule == "default"] == []
    mask = np.ones((2, 32), np.float32)
    mask[1, 20:] = 0
    random = np.random.default_rng(0)
    assert_numbers(
        model, tmp_path, {"x": random.standard_normal((2, 32, 64)).astype(np.float32), "m": mask}, exact=False
    )
