"""From trained weights to the ONNX graph that serving runs: features and model in, probabilities out.

Needs onnx; training only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from predictor.features import DENSE_FEATURES
from predictor.training import calibrate

OPSET = 17
BERT_EPSILON = 1e-12
PADDING_PIECE = 0
ZERO = 128
"""The byte that stands for 0 in a table of bytes without sign."""
ANSWER = "probabilities"
INPUTS = "inputs"
"""What the head sees of a prompt: everything but the served model."""
CONTRIBUTED = "com.microsoft"
SHIFT = "reached_shift"
"""What is added, for each served model, to the share that its p90 is thought to reach."""
OWNER = "owner"
"""Which query each row of the answer is of: one query may be forecast for many models."""
Array = NDArray[np.float32]
State = Mapping[str, Array]


@dataclass(slots=True)
class Drawing:
    """A graph while it is drawn; every call adds a node and names its output."""

    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    prefix: str = ""

    def constant(self, name: str, value: object) -> str:
        self.constants[name] = np.asarray(value)
        return name

    def call(
        self, kind: str, *sources: str, domain: str = "", name: str = "", **options: int | float | list[int]
    ) -> str:
        name = name or f"{self.prefix}{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(sources), [name], domain=domain, **options))
        return name

    def linear(self, source: str, state: State, name: str) -> str:
        """A `torch.nn.Linear` on the last axis."""
        weight = self.constant(f"{name}.weight", np.ascontiguousarray(state[f"{name}.weight"].T))
        return self.call(
            "Add", self.call("MatMul", source, weight), self.constant(f"{name}.bias", state[f"{name}.bias"])
        )

    def plus(self, first: str, second: str) -> str:
        """A sum. Not `Add`: that and a normalisation would be fused into an operator five times slower."""
        return self.call("Sum", first, second)

    def normalised(self, source: str, state: State, name: str, epsilon: float = 1e-5) -> str:
        """A `torch.nn.LayerNorm` on the last axis."""
        scale = self.constant(f"{name}.weight", state[f"{name}.weight"])
        shift = self.constant(f"{name}.bias", state[f"{name}.bias"])
        return self.call("LayerNormalization", source, scale, shift, axis=-1, epsilon=epsilon)

    def finished(self, name: str, output: str, width: int) -> bytes:
        """The checked graph, with those inputs that some node reads."""
        inputs = {
            "pieces": (TensorProto.INT64, ["queries", "pieces_width"]),
            "slots": (TensorProto.INT64, ["queries", "width"]),
            "weights": (TensorProto.FLOAT, ["queries", "width"]),
            "dense": (TensorProto.FLOAT, ["queries", DENSE_FEATURES]),
            INPUTS: (TensorProto.FLOAT, ["queries", width]),
            OWNER: (TensorProto.INT64, ["rows"]),
            "model": (TensorProto.INT64, ["rows"]),
        }
        made = {target for node in self.nodes for target in node.output}
        read = {source for node in self.nodes for source in node.input}
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(key, *kind) for key, kind in inputs.items() if key in read - made],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["rows", width])],
            [numpy_helper.from_array(value, key) for key, value in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIBUTED, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model)
        serialised: bytes = model.SerializeToString()
        return serialised


def lexical_graph(table: Array, head: State, sharpness: Array) -> bytes:
    """The lexical model. `table` `[slots, views]` is kept in bytes with a scale per view; `head` holds the
    weights of `lexical.Head` by name; `sharpness` is a factor for each served model."""
    draw = Drawing()
    draw.call("Concat", _scores(draw, table), "dense", name=INPUTS, axis=1)
    _answer(draw, head, sharpness)
    return draw.finished("lexical", ANSWER, len(head["last.bias"]))


def student_graph(
    table: Array, body: State, head: State, sharpness: Array, *, heads: Sequence[int], query_heads: int
) -> bytes:
    """The small encoder beside the lexical scores; `body` holds the weights of `networks.Trimmed` by name.
    The matrices are kept in bytes."""
    draw = Drawing()
    draw.call(
        "Concat", _read(draw, body, heads, query_heads), _scores(draw, table), "dense", name=INPUTS, axis=1
    )
    reading = onnx.load_from_string(in_bytes(draw.finished("student", INPUTS, len(head["mean"]))))
    answering = Drawing(prefix="head_")
    _answer(answering, head, sharpness)
    rest = onnx.load_from_string(answering.finished("head", ANSWER, len(head["last.bias"])))
    del reading.graph.output[:]
    reading.graph.node.extend(rest.graph.node)
    reading.graph.initializer.extend(rest.graph.initializer)
    reading.graph.output.extend(rest.graph.output)
    reading.graph.input.extend(each for each in rest.graph.input if each.name != INPUTS)
    onnx.checker.check_model(reading)
    serialised: bytes = reading.SerializeToString()
    return serialised


def in_bytes(graph: bytes) -> bytes:
    """The graph with its matrix products in eight bits; seven for weights, so that every processor agrees."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with TemporaryDirectory() as folder:
        whole, small = Path(folder) / "whole.onnx", Path(folder) / "small.onnx"
        whole.write_bytes(graph)
        quantize_dynamic(
            whole,
            small,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            extra_options={"DefaultTensorType": TensorProto.FLOAT, "MatMulConstBOnly": True},
        )
        return small.read_bytes()


def _scores(draw: Drawing, table: Array) -> str:
    """Lexical scores `[queries, views]` from slots and weights."""
    scale = np.maximum(np.abs(table).max(axis=0), 1e-12) / 127.0
    kept = draw.constant("slot_table", np.round(table / scale).astype(np.int8))
    vectors = draw.call("Cast", draw.call("Gather", kept, "slots"), to=TensorProto.FLOAT)
    axis = draw.constant("axis", np.array([1]))
    sums = draw.call("MatMul", draw.call("Unsqueeze", "weights", axis), vectors)
    return draw.call(
        "Mul", draw.call("Squeeze", sums, axis), draw.constant("slot_scale", scale.astype(np.float32))
    )


def _answer(draw: Drawing, head: State, sharpness: Array) -> None:
    """`lexical.Head`, sharpened for the served model and bent for the kind of prompt, as `probabilities`.

    What hangs on the prompt alone is worked out once, however many models it is asked of.
    """
    prompt, models = _standardised(draw, head), draw.constant("models", head["models.weight"])
    state, served = _first(draw, head, prompt, models), draw.call("Gather", models, "model")
    for name in ("second", "last"):
        weight = draw.constant(f"head.{name}.weight", head[f"{name}.weight"])
        bias = draw.constant(f"head.{name}.bias", head[f"{name}.bias"])
        both = draw.call("Concat", draw.call("Relu", state), served, axis=1)
        state = draw.call("Gemm", both, weight, bias, transB=1)
    factor = draw.call("Gather", draw.constant("sharpness", sharpness.reshape(-1, 1)), "model")
    drawn = draw.call("Softmax", draw.call("Mul", state, factor), axis=1)
    none = draw.constant(SHIFT, np.zeros((len(sharpness), 1), dtype=np.float32))
    reached = _reached(draw, prompt, draw.call("Gather", none, "model"), len(head["mean"]))
    _bent(draw, drawn, reached, len(head["last.bias"]))


def _standardised(draw: Drawing, head: State) -> str:
    centred = draw.call("Sub", INPUTS, draw.constant("mean", head["mean"]))
    scaled = draw.call("Mul", centred, draw.constant("scale", head["scale"]))
    low, high = draw.constant("low", np.float32(-5.0)), draw.constant("high", np.float32(5.0))
    return draw.call("Clip", scaled, low, high)


def _first(draw: Drawing, head: State, prompt: str, models: str) -> str:
    """The first layer: what a prompt adds to it, and what the served model does, which is one row of a table.

    The weights are cut and the table is made when a graph is loaded, so that `graft` finds them whole.
    """
    weight = draw.constant("head.first.weight", head["first.weight"])
    bias = draw.constant("head.first.bias", head["first.bias"])
    ends = (0, len(head["mean"]), head["first.weight"].shape[1])
    begin, cut, end = (draw.constant(f"first.{place}", np.array([place])) for place in ends)
    axis = draw.constant("first.axis", np.array([1]))
    of_prompt = draw.call("Gemm", prompt, draw.call("Slice", weight, begin, cut, axis), transB=1)
    table = draw.call("Gemm", models, draw.call("Slice", weight, cut, end, axis), bias, transB=1)
    return draw.call("Add", draw.call("Gather", of_prompt, OWNER), draw.call("Gather", table, "model"))


def _reached(draw: Drawing, prompt: str, shift: str, inputs: int) -> str:
    """`calibrate.Kinds.reached_by`; all prompts are of one kind until `graft` fills in others."""
    even = calibrate.one_kind(inputs)
    weight, bias = draw.constant("kinds.weight", even.weight), draw.constant("kinds.bias", even.bias)
    likeness = draw.call("Softmax", draw.call("Gemm", prompt, weight, bias, transB=1), axis=1)
    each = draw.constant("kinds.reached", even.reached[:, None])
    reached = draw.call("Gemm", draw.call("Gather", likeness, OWNER), each, shift)
    least = draw.constant("least_reached", np.float32(calibrate.LEAST_REACHED))
    most = draw.constant("most_reached", np.float32(calibrate.MOST_REACHED))
    return draw.call("Clip", reached, least, most)


def _bent(draw: Drawing, probabilities: str, reached: str, ranges: int) -> None:
    """`calibrate.bent` as three matrix products, where many small operators would cost more: how far the sums
    are beyond each knot, how much steeper it gets there, and what that adds to each range.
    """
    body, tail = calibrate.STATED - calibrate.MEDIAN, calibrate.FAR - calibrate.STATED
    even = np.array([1.0, 0.0])  # a slope: where nothing is reached, and what it gains with `reached`
    inner = np.array([-calibrate.MEDIAN, 1.0]) / body
    outer = np.array([calibrate.FAR, -1.0]) / tail
    steeper = np.repeat([inner - even, outer - inner, even - outer], ranges, axis=0).astype(np.float32)
    knots = np.repeat([calibrate.MEDIAN, calibrate.STATED, calibrate.FAR], ranges).astype(np.float32)
    sums, parts = np.triu(np.ones((ranges, ranges))), np.eye(ranges) - np.eye(ranges, k=1)
    along = draw.constant("bend.sums", np.tile(sums, 3).astype(np.float32))
    beyond = draw.call("Relu", draw.call("Gemm", probabilities, along, draw.constant("bend.knots", -knots)))
    at_none = draw.constant("bend.slope", steeper[:, 0])
    slopes = draw.call("Gemm", reached, draw.constant("bend.gain", steeper[None, :, 1]), at_none)
    back = draw.constant("bend.parts", np.tile(parts, (3, 1)).astype(np.float32))
    moved = draw.call("Gemm", draw.call("Mul", beyond, slopes), back, probabilities)
    draw.call("Relu", moved, name=ANSWER)


def _read(draw: Drawing, body: State, heads: Sequence[int], query_heads: int) -> str:
    """`networks.Trimmed`: what its queries read `[queries, queries * width]`."""
    nothing = draw.constant("nothing", np.int64(0))
    real = draw.call("Cast", draw.call("Not", draw.call("Equal", "pieces", nothing)), to=TensorProto.INT32)
    if "merge.weight" in body:
        state, real = _grouped(draw, body, real)
    else:
        state = _words(draw, body["table"])
    state = draw.normalised(
        draw.plus(state, _places(draw, body["places"], state)), body, "begin_norm", BERT_EPSILON
    )
    for layer, own in enumerate(heads):
        if f"layers.{layer}.merge.weight" in body:
            state, real = _merged(draw, body, f"layers.{layer}", state=state, real=real)
        state = _trimmed_layer(draw, body, f"layers.{layer}", state=state, real=real, heads=own)
    told = draw.normalised(state, body, "told_norm")
    queries = draw.constant("queries", body["queries"][None])
    query = draw.linear(
        draw.normalised(queries, body, "reader.attention_norm"), body, "reader.attention.query"
    )
    shape = draw.call("Shape", "pieces", start=0, end=1)
    times = draw.call("Concat", shape, draw.constant("once", np.array([1, 1])), axis=0)
    query = draw.call("Tile", query, times)
    read = _layer(draw, body, "reader", state=queries, query=query, told=told, real=real, heads=query_heads)
    return draw.call("Reshape", read, draw.constant("flat", np.array([0, -1])))


def _grouped(draw: Drawing, body: State, real: str) -> tuple[str, str]:
    """States of neighbouring pieces as one straight from a table in bytes, and which of them are real."""
    table, weight = body["table"].copy(), body["merge.weight"]
    width = table.shape[1]
    together = weight.shape[1] // width
    table[PADDING_PIECE] = 0.0
    grain = np.maximum(np.abs(table).max(axis=0), 1e-12) / 127.0
    kept = draw.constant("piece_table", (np.round(table / grain) + ZERO).astype(np.uint8))
    weight = (weight * np.tile(grain, together)).T
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12) / 63.0  # seven bits, as `in_bytes`
    wide = draw.constant("piece_groups", np.array([0, -1, together * width]))
    groups = draw.call("Reshape", draw.call("Gather", kept, "pieces"), wide)
    bytes_ = draw.constant("merge.weight", np.round(weight / scale).astype(np.int8))
    zero, none = draw.constant("piece_zero", np.uint8(ZERO)), draw.constant("merge.zero", np.int8(0))
    summed = draw.call("Cast", draw.call("MatMulInteger", groups, bytes_, zero, none), to=TensorProto.FLOAT)
    state = draw.call("Mul", summed, draw.constant("merge.scale", scale.astype(np.float32)))
    return state, _any_real(draw, real, "pieces", together)


def _any_real(draw: Drawing, real: str, name: str, together: int) -> str:
    """Which groups hold anything real."""
    grouped = draw.call("Reshape", real, draw.constant(f"{name}.grouped", np.array([0, -1, together])))
    return draw.call("ReduceMax", grouped, axes=[-1], keepdims=0)


def _merged(draw: Drawing, body: State, name: str, *, state: str, real: str) -> tuple[str, str]:
    """States of neighbours as one, and which of them are real."""
    weight = body[f"{name}.merge.weight"]
    width, together = weight.shape[0], weight.shape[1] // weight.shape[0]
    last = draw.constant("last_axis", np.array([-1]))
    shown = draw.call("Unsqueeze", draw.call("Cast", real, to=TensorProto.FLOAT), last)
    wide = draw.constant(f"{name}.wide", np.array([0, -1, together * width]))
    groups = draw.call("Reshape", draw.call("Mul", state, shown), wide)
    kept = draw.constant(f"{name}.merge.weight", np.ascontiguousarray(weight.T))
    return draw.call("MatMul", groups, kept), _any_real(draw, real, name, together)


def _trimmed_layer(draw: Drawing, body: State, name: str, *, state: str, real: str, heads: int) -> str:
    """`networks.TrimmedLayer`."""
    query = draw.linear(state, body, f"{name}.attention.query")
    found = _attention(draw, body, name, query=query, told=state, real=real, heads=heads)
    state = draw.normalised(draw.plus(state, found), body, f"{name}.attention_norm", BERT_EPSILON)
    hidden = draw.call("FastGelu", draw.linear(state, body, f"{name}.up"), domain=CONTRIBUTED)
    added = draw.plus(state, draw.linear(hidden, body, f"{name}.down"))
    return draw.normalised(added, body, f"{name}.hidden_norm", BERT_EPSILON)


def _layer(
    draw: Drawing, body: State, name: str, *, state: str, query: str, told: str, real: str, heads: int
) -> str:
    """`networks.Layer`, given its projected queries."""
    found = _attention(draw, body, name, query=query, told=told, real=real, heads=heads)
    state = draw.plus(state, found)
    hidden = draw.normalised(state, body, f"{name}.hidden_norm")
    hidden = draw.call("Relu", draw.linear(hidden, body, f"{name}.up"))
    return draw.plus(state, draw.linear(hidden, body, f"{name}.down"))


def _attention(draw: Drawing, body: State, name: str, *, query: str, told: str, real: str, heads: int) -> str:
    """`networks.Attention`, given its projected queries."""
    key = draw.linear(told, body, f"{name}.attention.key")
    value = draw.linear(told, body, f"{name}.attention.value")
    found = draw.call("MultiHeadAttention", query, key, value, "", real, domain=CONTRIBUTED, num_heads=heads)
    return draw.linear(found, body, f"{name}.attention.out")


def _words(draw: Drawing, table: Array) -> str:
    """A row for each piece from a table kept in bytes, with a scale per row."""
    scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127.0
    kept = draw.constant("piece_table", np.round(table / scale).astype(np.int8))
    rows = draw.call("Cast", draw.call("Gather", kept, "pieces"), to=TensorProto.FLOAT)
    return draw.call(
        "Mul", rows, draw.call("Gather", draw.constant("piece_scale", scale.astype(np.float32)), "pieces")
    )


def _places(draw: Drawing, places: Array, state: str) -> str:
    width = draw.call("Shape", state, start=1, end=2)
    start = draw.constant("place_start", np.array([0]))
    return draw.call("Slice", draw.constant("places", places), start, width)
