"""Export trained weights to the ONNX graph for serving, from features and model to probabilities.

Does not calibrate: a new graph has a single kind of prompts, which has no effect and which `onnx_head`
replaces. Requires onnx. Used in training only.
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
UINT8_ZERO = 128
"""The zero point of a table in uint8."""
OUTPUT = "probabilities"
INPUTS = "inputs"
"""The inputs of the head per prompt: encoder output, lexical scores and dense features."""
CONTRIB_DOMAIN = "com.microsoft"
SHIFT = "reached_shift"
"""The correction of the expected coverage of the raw p90 for each served model."""
OWNER = "owner"
"""The query index of each output row. A query can be forecast for several models."""
Array = NDArray[np.float32]
State = Mapping[str, Array]


@dataclass(slots=True)
class GraphBuilder:
    """Build a graph. Methods that add nodes return the name of the output."""

    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    prefix: str = ""

    def constant(self, name: str, value: object) -> str:
        self.constants[name] = np.asarray(value)
        return name

    def node(
        self, kind: str, *inputs: str, domain: str = "", name: str = "", **options: int | float | list[int]
    ) -> str:
        name = name or f"{self.prefix}{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], domain=domain, **options))
        return name

    def linear(self, source: str, state: State, name: str) -> str:
        """Add a `torch.nn.Linear` on the last axis."""
        weight = self.constant(f"{name}.weight", np.ascontiguousarray(state[f"{name}.weight"].T))
        product = self.node("MatMul", source, weight)
        return self.node("Add", product, self.constant(f"{name}.bias", state[f"{name}.bias"]))

    def add(self, first: str, second: str) -> str:
        """Add a `Sum`. An `Add` and a LayerNorm would be fused into an operator that is five times slower."""
        return self.node("Sum", first, second)

    def layer_norm(self, source: str, state: State, name: str, epsilon: float = 1e-5) -> str:
        """Add a `torch.nn.LayerNorm` on the last axis."""
        scale = self.constant(f"{name}.weight", state[f"{name}.weight"])
        shift = self.constant(f"{name}.bias", state[f"{name}.bias"])
        return self.node("LayerNormalization", source, scale, shift, axis=-1, epsilon=epsilon)

    def build(self, name: str, output: str, width: int) -> bytes:
        """Return the checked, serialised graph. It declares those known inputs that some node reads."""
        inputs = {
            "pieces": (TensorProto.INT64, ["queries", "pieces_width"]),
            "slots": (TensorProto.INT64, ["queries", "width"]),
            "weights": (TensorProto.FLOAT, ["queries", "width"]),
            "dense": (TensorProto.FLOAT, ["queries", DENSE_FEATURES]),
            INPUTS: (TensorProto.FLOAT, ["queries", width]),
            OWNER: (TensorProto.INT64, ["rows"]),
            "model": (TensorProto.INT64, ["rows"]),
        }
        written = {target for node in self.nodes for target in node.output}
        needed = {source for node in self.nodes for source in node.input} - written
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(key, *kind) for key, kind in inputs.items() if key in needed],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["rows", width])],
            [numpy_helper.from_array(value, key) for key, value in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model)
        serialised: bytes = model.SerializeToString()
        return serialised


def lexical_graph(table: Array, head: State, sharpness: Array) -> bytes:
    """Return the graph of the lexical model.

    `table` `[slots, views]` is stored in int8 with a scale per view. `head` contains the weights of
    `length_head.LengthHead` by name. `sharpness` is a factor for each served model `[models]`.
    """
    graph = GraphBuilder()
    graph.node("Concat", _lexical_scores(graph, table), "dense", name=INPUTS, axis=1)
    _head(graph, head, sharpness)
    return graph.build("lexical", OUTPUT, len(head["last.bias"]))


def student_graph(
    table: Array, body: State, head: State, sharpness: Array, *, heads: Sequence[int], query_heads: int
) -> bytes:
    """Return the graph of the small encoder with the lexical scores. Its matrices are stored in int8.

    `body` contains the weights of `networks.TrimmedEncoder` by name. `heads` has the heads of each layer.
    """
    graph = GraphBuilder()
    encoded, scores = _encoder(graph, body, heads, query_heads), _lexical_scores(graph, table)
    graph.node("Concat", encoded, scores, "dense", name=INPUTS, axis=1)
    model = onnx.load_from_string(quantize(graph.build("student", INPUTS, len(head["mean"]))))
    head_graph = GraphBuilder(prefix="head_")
    _head(head_graph, head, sharpness)
    head_model = onnx.load_from_string(head_graph.build("head", OUTPUT, len(head["last.bias"])))
    del model.graph.output[:]
    model.graph.node.extend(head_model.graph.node)
    model.graph.initializer.extend(head_model.graph.initializer)
    model.graph.output.extend(head_model.graph.output)
    model.graph.input.extend(each for each in head_model.graph.input if each.name != INPUTS)
    onnx.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised


def quantize(graph: bytes) -> bytes:
    """Return the graph with dynamically quantized matrix products: activations in eight bits, weights in
    seven, so that results are equal on all CPUs.
    """
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


def _lexical_scores(graph: GraphBuilder, table: Array) -> str:
    """Add lexical scores `[queries, views]` from slots and weights."""
    scale = np.maximum(np.abs(table).max(axis=0), 1e-12) / 127.0
    quantized = graph.constant("slot_table", np.round(table / scale).astype(np.int8))
    vectors = graph.node("Cast", graph.node("Gather", quantized, "slots"), to=TensorProto.FLOAT)
    axis = graph.constant("axis", np.array([1]))
    sums = graph.node(
        "Squeeze", graph.node("MatMul", graph.node("Unsqueeze", "weights", axis), vectors), axis
    )
    return graph.node("Mul", sums, graph.constant("slot_scale", scale.astype(np.float32)))


def _head(graph: GraphBuilder, head: State, sharpness: Array) -> None:
    """Add `length_head.LengthHead`, sharpened for the served model and recalibrated for the kind of prompt.

    Operations that depend only on the prompt run once per prompt, independent of the number of models.
    """
    centred = graph.node("Sub", INPUTS, graph.constant("mean", head["mean"]))
    scaled = graph.node("Mul", centred, graph.constant("scale", head["scale"]))
    low, high = graph.constant("low", np.float32(-5.0)), graph.constant("high", np.float32(5.0))
    prompt = graph.node("Clip", scaled, low, high)
    models = graph.constant("models", head["models.weight"])
    state, served = _first_layer(graph, head, prompt, models), graph.node("Gather", models, "model")
    for name in ("second", "last"):
        weight = graph.constant(f"head.{name}.weight", head[f"{name}.weight"])
        bias = graph.constant(f"head.{name}.bias", head[f"{name}.bias"])
        both = graph.node("Concat", graph.node("Relu", state), served, axis=1)
        state = graph.node("Gemm", both, weight, bias, transB=1)
    factor = graph.node("Gather", graph.constant("sharpness", sharpness.reshape(-1, 1)), "model")
    probabilities = graph.node("Softmax", graph.node("Mul", state, factor), axis=1)
    no_shift = graph.constant(SHIFT, np.zeros((len(sharpness), 1), dtype=np.float32))
    shift = graph.node("Gather", no_shift, "model")
    coverage = _expected_coverage(graph, prompt, shift, len(head["mean"]))
    _recalibrate(graph, probabilities, coverage, len(head["last.bias"]))


def _first_layer(graph: GraphBuilder, head: State, prompt: str, models: str) -> str:
    """Add the first layer as the sum of the prompt's part and the served model's, which is a row of a table.

    The weights are sliced and the table is computed when a graph is loaded, so that `onnx_head` can read and
    replace whole weights.
    """
    weight = graph.constant("head.first.weight", head["first.weight"])
    bias = graph.constant("head.first.bias", head["first.bias"])
    ends = (0, len(head["mean"]), head["first.weight"].shape[1])
    begin, cut, end = (graph.constant(f"first.{place}", np.array([place])) for place in ends)
    axis = graph.constant("first.axis", np.array([1]))
    of_prompt = graph.node("Gemm", prompt, graph.node("Slice", weight, begin, cut, axis), transB=1)
    table = graph.node("Gemm", models, graph.node("Slice", weight, cut, end, axis), bias, transB=1)
    return graph.node("Add", graph.node("Gather", of_prompt, OWNER), graph.node("Gather", table, "model"))


def _expected_coverage(graph: GraphBuilder, prompt: str, shift: str, inputs: int) -> str:
    """Add `calibrate.PromptKinds.expected_coverage`, with a single kind until `onnx_head.with_kinds`."""
    kinds = calibrate.single_kind(inputs)
    weight, bias = graph.constant("kinds.weight", kinds.weight), graph.constant("kinds.bias", kinds.bias)
    memberships = graph.node("Softmax", graph.node("Gemm", prompt, weight, bias, transB=1), axis=1)
    coverage = graph.constant("kinds.reached", kinds.p90_coverage[:, None])
    expected = graph.node("Gemm", graph.node("Gather", memberships, OWNER), coverage, shift)
    least = graph.constant("least_reached", np.float32(calibrate.MIN_P90_COVERAGE))
    most = graph.constant("most_reached", np.float32(calibrate.MAX_P90_COVERAGE))
    return graph.node("Clip", expected, least, most)


def _recalibrate(graph: GraphBuilder, probabilities: str, coverage: str, ranges: int) -> None:
    """Add `calibrate.recalibrate` as three matrix products, which is faster than many small operators.

    They compute the excess of the cumulative sums over each knot, the change of slope at each knot, and the
    resulting change of each range.
    """
    body, tail = calibrate.P90 - calibrate.MEDIAN, calibrate.P99 - calibrate.P90
    even = np.array([1.0, 0.0])  # a slope: its value at coverage 0, and its gain per unit of coverage
    inner = np.array([-calibrate.MEDIAN, 1.0]) / body
    outer = np.array([calibrate.P99, -1.0]) / tail
    steeper = np.repeat([inner - even, outer - inner, even - outer], ranges, axis=0).astype(np.float32)
    knots = np.repeat([calibrate.MEDIAN, calibrate.P90, calibrate.P99], ranges).astype(np.float32)
    sums, parts = np.triu(np.ones((ranges, ranges))), np.eye(ranges) - np.eye(ranges, k=1)
    along = graph.constant("bend.sums", np.tile(sums, 3).astype(np.float32))
    offsets = graph.constant("bend.knots", -knots)
    beyond = graph.node("Relu", graph.node("Gemm", probabilities, along, offsets))
    base = graph.constant("bend.slope", steeper[:, 0])
    slopes = graph.node("Gemm", coverage, graph.constant("bend.gain", steeper[None, :, 1]), base)
    back = graph.constant("bend.parts", np.tile(parts, (3, 1)).astype(np.float32))
    moved = graph.node("Gemm", graph.node("Mul", beyond, slopes), back, probabilities)
    graph.node("Relu", moved, name=OUTPUT)


def _encoder(graph: GraphBuilder, body: State, heads: Sequence[int], query_heads: int) -> str:
    """Add `networks.TrimmedEncoder`. The output is `[prompts, queries * width]`."""
    padding = graph.node("Equal", "pieces", graph.constant("nothing", np.int64(0)))
    mask = graph.node("Cast", graph.node("Not", padding), to=TensorProto.INT32)
    if "merge.weight" in body:
        state, mask = _merged_embeddings(graph, body, mask)
    else:
        state = _embeddings(graph, body["table"])
    width = graph.node("Shape", state, start=1, end=2)
    start = graph.constant("place_start", np.array([0]))
    positions = graph.node("Slice", graph.constant("places", body["positions"]), start, width)
    state = graph.add(state, positions)
    state = graph.layer_norm(state, body, "embedding_norm", BERT_EPSILON)
    for layer, own in enumerate(heads):
        if f"layers.{layer}.merge.weight" in body:
            state, mask = _merge(graph, body, f"layers.{layer}", state=state, mask=mask)
        state = _trimmed_layer(graph, body, f"layers.{layer}", state=state, mask=mask, heads=own)
    memory = graph.layer_norm(state, body, "memory_norm")
    queries = graph.constant("queries", body["queries"][None])
    normed = graph.layer_norm(queries, body, "reader.attention_norm")
    query = graph.linear(normed, body, "reader.attention.query")
    shape = graph.node("Shape", "pieces", start=0, end=1)
    repeats = graph.node("Concat", shape, graph.constant("once", np.array([1, 1])), axis=0)
    query = graph.node("Tile", query, repeats)
    readout = _pre_norm_layer(
        graph, body, "reader", state=queries, query=query, memory=memory, mask=mask, heads=query_heads
    )
    return graph.node("Reshape", readout, graph.constant("flat", np.array([0, -1])))


def _merged_embeddings(graph: GraphBuilder, body: State, mask: str) -> tuple[str, str]:
    """Add merged embeddings of neighbouring pieces, from a table in uint8, and the mask of the groups."""
    table, weight = body["table"].copy(), body["merge.weight"]
    width = table.shape[1]
    together = weight.shape[1] // width
    table[PADDING_PIECE] = 0.0
    grain = np.maximum(np.abs(table).max(axis=0), 1e-12) / 127.0
    quantized = graph.constant("piece_table", (np.round(table / grain) + UINT8_ZERO).astype(np.uint8))
    weight = (weight * np.tile(grain, together)).T
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12) / 63.0  # seven bits, as in `quantize`
    group_shape = graph.constant("piece_groups", np.array([0, -1, together * width]))
    groups = graph.node("Reshape", graph.node("Gather", quantized, "pieces"), group_shape)
    matrix = graph.constant("merge.weight", np.round(weight / scale).astype(np.int8))
    zeros = graph.constant("piece_zero", np.uint8(UINT8_ZERO)), graph.constant("merge.zero", np.int8(0))
    product = graph.node("MatMulInteger", groups, matrix, *zeros)
    summed = graph.node("Cast", product, to=TensorProto.FLOAT)
    state = graph.node("Mul", summed, graph.constant("merge.scale", scale.astype(np.float32)))
    return state, _merged_mask(graph, mask, "pieces", together)


def _merged_mask(graph: GraphBuilder, mask: str, name: str, together: int) -> str:
    """Add the mask of groups of neighbours, true for groups with at least one member that is not padding."""
    grouped = graph.node("Reshape", mask, graph.constant(f"{name}.grouped", np.array([0, -1, together])))
    return graph.node("ReduceMax", grouped, axes=[-1], keepdims=0)


def _merge(graph: GraphBuilder, body: State, name: str, *, state: str, mask: str) -> tuple[str, str]:
    """Add the merged states of neighbours, and the mask of the groups."""
    weight = body[f"{name}.merge.weight"]
    width, together = weight.shape[0], weight.shape[1] // weight.shape[0]
    last = graph.constant("last_axis", np.array([-1]))
    shown = graph.node("Unsqueeze", graph.node("Cast", mask, to=TensorProto.FLOAT), last)
    group_shape = graph.constant(f"{name}.wide", np.array([0, -1, together * width]))
    groups = graph.node("Reshape", graph.node("Mul", state, shown), group_shape)
    matrix = graph.constant(f"{name}.merge.weight", np.ascontiguousarray(weight.T))
    return graph.node("MatMul", groups, matrix), _merged_mask(graph, mask, name, together)


def _trimmed_layer(graph: GraphBuilder, body: State, name: str, *, state: str, mask: str, heads: int) -> str:
    """Add `networks.TrimmedLayer`."""
    query = graph.linear(state, body, f"{name}.attention.query")
    attended = _attention(graph, body, name, query=query, memory=state, mask=mask, heads=heads)
    state = graph.layer_norm(graph.add(state, attended), body, f"{name}.attention_norm", BERT_EPSILON)
    hidden = graph.node("FastGelu", graph.linear(state, body, f"{name}.up"), domain=CONTRIB_DOMAIN)
    added = graph.add(state, graph.linear(hidden, body, f"{name}.down"))
    return graph.layer_norm(added, body, f"{name}.hidden_norm", BERT_EPSILON)


def _pre_norm_layer(
    graph: GraphBuilder, body: State, name: str, *, state: str, query: str, memory: str, mask: str, heads: int
) -> str:
    """Add `networks.PreNormLayer`. `query` is the projected queries."""
    state = graph.add(
        state, _attention(graph, body, name, query=query, memory=memory, mask=mask, heads=heads)
    )
    hidden = graph.layer_norm(state, body, f"{name}.hidden_norm")
    hidden = graph.node("Relu", graph.linear(hidden, body, f"{name}.up"))
    return graph.add(state, graph.linear(hidden, body, f"{name}.down"))


def _attention(
    graph: GraphBuilder, body: State, name: str, *, query: str, memory: str, mask: str, heads: int
) -> str:
    """Add `networks.Attention`. `query` is the projected queries."""
    key = graph.linear(memory, body, f"{name}.attention.key")
    value = graph.linear(memory, body, f"{name}.attention.value")
    attended = graph.node(
        "MultiHeadAttention", query, key, value, "", mask, domain=CONTRIB_DOMAIN, num_heads=heads
    )
    return graph.linear(attended, body, f"{name}.attention.out")


def _embeddings(graph: GraphBuilder, table: Array) -> str:
    """Add the embedding of each piece, from a table in int8 with a scale per row."""
    scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127.0
    quantized = graph.constant("piece_table", np.round(table / scale).astype(np.int8))
    rows = graph.node("Cast", graph.node("Gather", quantized, "pieces"), to=TensorProto.FLOAT)
    scales = graph.constant("piece_scale", scale.astype(np.float32))
    return graph.node("Mul", rows, graph.node("Gather", scales, "pieces"))
