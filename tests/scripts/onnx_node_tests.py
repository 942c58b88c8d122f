"""Runs ONNX's own tests of operators as networks of the reward `onnx`.

Usage: onnx_node_tests.py DIRECTORY [--roll PROGRAM] [--only TEXT] [--table]

DIRECTORY holds the tests, one folder each with `model.onnx` and `test_data_set_0`, as in `onnx/backend/test/data/node`
of ONNX's repository. Without tests there, those of the package onnx are written to it. Downloads nothing. Needs onnx.

Each test becomes a network whose inputs of floats are constants plus zero times the mean of a picture, so that they are
computed when it runs; if it is refused so, as weights of convolutions are, the first input alone. Integers and truth
values stay constants. Its score is the largest difference from the expected
outputs, relative to the tolerance of ONNX's tests: above 1 is wrong. Prints the number of tests by result, the refusals
at the start by reason, and each test that is wrong or refused only when it runs. `--table` lists the operators by
result, as Markdown. Exit status 1: a test is wrong, or is refused only when it runs.
"""
import argparse
import collections
import concurrent.futures
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RTOL, ATOL = 1e-3, 1e-7
# Tests that ONNX Runtime leaves out, too: it computes what the reward computes.
DISPUTED = ["test_resize_downsample_scales_cubic_align_corners", "test_resize_downsample_scales_linear_align_corners"]
# The newest operator set that the reward knows.
OPSET = 23
CASTS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


class NotBuilt(Exception):
    """The test cannot be written as a network of a picture."""


def write_tests(directory):
    """Writes the tests of the package onnx, those of tensors."""
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None):
        data = case.data_sets[0]
        if any(value is None or isinstance(value, (dict, list)) for values in data for value in values):
            continue
        folder = directory / case.name / "test_data_set_0"
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(case.model, folder.parent / "model.onnx")
        for kind, values in zip(("input", "output"), data):
            for i, value in enumerate(values):
                tensor = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(value)
                (folder / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())


def tensors(folder, kind, values):
    """The tensors of a data set, in the order of the graph's inputs or outputs."""
    found = []
    for i, value in enumerate(values):
        if not value.type.HasField("tensor_type"):
            raise NotBuilt("sequences and optional values")
        tensor = onnx.TensorProto()
        tensor.ParseFromString((folder / f"{kind}_{i}.pb").read_bytes())
        found.append(tensor)
    return found


def network(folder, computed):
    """The network of a test, of whose inputs the first `computed` are computed, and the names of its operators."""
    model = onnx.load(folder / "model.onnx")
    graph, data = model.graph, folder / "test_data_set_0"
    inputs, outputs = tensors(data, "input", graph.input), tensors(data, "output", graph.output)
    operators = sorted({node.op_type for node in graph.node})
    nodes = [
        helper.make_node("ReduceMean", ["roll_frames"], ["roll_mean"], keepdims=0),
        helper.make_node("Mul", ["roll_mean", "roll_nought"], ["roll_zero"]),
    ]
    constants = [numpy_helper.from_array(np.float32(0), "roll_nought")]
    for i, (value, tensor) in enumerate(zip(graph.input, inputs)):
        name = value.name
        if tensor.data_type in CASTS and i < computed:
            tensor.name = f"{name}__"
            nodes.append(helper.make_node("Cast", ["roll_zero"], [f"{name}__zero"], to=tensor.data_type))
            nodes.append(helper.make_node("Add", [tensor.name, f"{name}__zero"], [name]))
        else:
            tensor.name = name
        constants.append(tensor)
    nodes.extend(graph.node)
    errors = []
    for value, tensor in zip(graph.output, outputs):
        name = value.name
        if tensor.data_type == TensorProto.STRING:
            raise NotBuilt("outputs of texts")
        expected = numpy_helper.to_array(tensor).astype(np.float32).reshape(-1)
        if expected.size == 0 or not np.isfinite(expected).all():
            raise NotBuilt("empty or infinite outputs")
        constants.append(numpy_helper.from_array(expected, f"{name}__expected"))
        constants.append(numpy_helper.from_array((ATOL + RTOL * np.abs(expected)).astype(np.float32), f"{name}__scale"))
        # A scalar has one element too; a wrong number of elements fails.
        constants.append(numpy_helper.from_array(np.array([expected.size], np.int64), f"{name}__flat"))
        nodes += [
            helper.make_node("Cast", [name], [f"{name}__cast"], to=TensorProto.FLOAT),
            helper.make_node("Reshape", [f"{name}__cast", f"{name}__flat"], [f"{name}__line"]),
            helper.make_node("Sub", [f"{name}__line", f"{name}__expected"], [f"{name}__minus"]),
            helper.make_node("Abs", [f"{name}__minus"], [f"{name}__abs"]),
            helper.make_node("Div", [f"{name}__abs", f"{name}__scale"], [f"{name}__part"]),
        ]
        errors.append(f"{name}__part")
    if not errors:
        raise NotBuilt("no output")
    constants.append(numpy_helper.from_array(np.array([1, -1], np.int64), "roll_row"))
    nodes += [
        helper.make_node("Concat", errors, ["roll_all"], axis=0),
        helper.make_node("Reshape", ["roll_all", "roll_row"], ["roll_rows"]),
        helper.make_node("ReduceMax", ["roll_rows"], ["roll_score"], keepdims=1),
    ]
    frames = helper.make_tensor_value_info("roll_frames", TensorProto.FLOAT, [1, 3, 8, 8])
    score = helper.make_tensor_value_info("roll_score", TensorProto.FLOAT, [1, 1])
    made = helper.make_model(helper.make_graph(nodes, "test", [frames], [score], [*graph.initializer, *constants]))
    del made.opset_import[:]
    made.opset_import.extend(model.opset_import)
    # The tests are of the newest operator set, in which most operators are as they were.
    for opset in made.opset_import:
        since = [onnx.defs.get_schema(node.op_type, opset.version, node.domain).since_version for node in graph.node
                 if node.domain == opset.domain and onnx.defs.has(node.op_type, node.domain)]
        if opset.domain == "" and max(since, default=0) <= OPSET < opset.version:
            opset.version = OPSET
    made.ir_version = model.ir_version
    return made, operators


def png():
    """A picture of 8 x 8."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(range(24 * y, 24 * y + 24)) for y in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def run(folder, roll, picture, scratch):
    """The result of a test, the reason, and its operators. Weights and options are constants where they must be."""
    result = run_once(folder, roll, picture, scratch, computed=99)
    return run_once(folder, roll, picture, scratch, computed=1) if "constant" in result[2] else result


def run_once(folder, roll, picture, scratch, computed):
    operators = []
    try:
        model, operators = network(folder, computed)
    except NotBuilt as reason:
        return folder.name, "not built", str(reason), operators
    file = scratch / f"{folder.name}.onnx"
    onnx.save(model, file)
    command = [roll, "-q", "rewards", "try", "onnx", picture, "--set", f"reward.file={file}", "--set", "reward.index=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return folder.name, "wrong", "it takes longer than 120 s", operators
    finally:
        file.unlink()
    if done.returncode == 0:
        found = re.search(r"-?\d[\d.e+-]*|nan|inf", done.stdout, re.I)
        error = float(found.group()) if found else float("nan")
        if folder.name in DISPUTED:
            return folder.name, "as ONNX Runtime", f"{error:.3g} times the tolerance", operators
        return folder.name, "right" if error <= 1 else "wrong", f"{error:.3g} times the tolerance", operators
    text = " ".join(done.stderr.split())
    result = "refused" if "setting up" in text else "refused when it runs"
    if re.search("uses the operator .* which this build cannot run|operator set it uses|uses the operator set", text):
        result = "of another operator"
    return folder.name, result, text.replace(str(file), "FILE"), operators


def main():
    arguments = argparse.ArgumentParser(usage=__doc__)
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("--roll", default="roll")
    arguments.add_argument("--only", default="")
    arguments.add_argument("--table", action="store_true")
    arguments = arguments.parse_args()
    if not next(arguments.directory.rglob("model.onnx"), None):
        write_tests(arguments.directory)
    folders = sorted(path.parent for path in arguments.directory.rglob("model.onnx"))
    folders = [folder for folder in folders if arguments.only in folder.name]
    if not folders:
        sys.exit(f"{arguments.directory}: expected folders with model.onnx, found none")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        picture = scratch / "picture.png"
        picture.write_bytes(png())
        with concurrent.futures.ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda folder: run(folder, arguments.roll, picture, scratch), folders))
    counts = collections.Counter(result for _, result, _, _ in results)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()), f"of {len(results)}")
    place = re.compile(r".*?FILE:?\s*(node `[^`]*`)?\s*|; the rewards.*")
    refused = [reason for _, result, reason, _ in results if result == "refused"]
    reasons = collections.Counter(place.sub("", reason)[:110] for reason in refused)
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    for name, result, reason, _ in results:
        if result in ("wrong", "refused when it runs"):
            print(f"{name}: {result}: {reason[-300:]}")
    if arguments.table:
        by_operator = collections.defaultdict(collections.Counter)
        for _, result, _, operators in results:
            if len(operators) == 1:
                by_operator[operators[0]][result] += 1
        print("\n| operator | right | refused | not built |\n|---|---|---|---|")
        for name, of in sorted(by_operator.items()):
            print(f"| `{name}` | {of['right']} | {of['refused']} | {of['not built']} |")
    sys.exit(1 if counts["wrong"] or counts["refused when it runs"] else 0)


if __name__ == "__main__":
    main()
