"""Custom ops in a dataset: the library that has them is loaded by workers, and by the process in
which the dispatcher computes how many splits there are."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.server import serve
from forebay.service.errors import InvalidArgument, PipelineError
from forebay.service.materialized.layout import require_complete
from forebay.service.pipelines.definitions import evaluate_in_subprocess
from forebay.service.pipelines.tf_data.graphs import InvalidGraph
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.proto import graph_pb2

from ..cluster import WorkerProcess
from ..forks import Fork
from ..stock import DispatcherProcess

# By TensorFlow's interface in C, which compiles in a fraction of a second.
PLUS_THOUSAND = r"""
#include <stddef.h>
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"

static void compute(void* kernel, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* input;
  TF_GetInput(context, 0, &input, status);
  TF_Tensor* output = TF_AllocateOutput(context, 0, TF_INT64, NULL, 0, 8, status);
  *(int64_t*)TF_TensorData(output) = *(int64_t*)TF_TensorData(input) + 1000;
  TF_DeleteTensor(output);
  TF_DeleteTensor(input);
  TF_DeleteStatus(status);
}

static void shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* scalar = TF_ShapeInferenceContextScalar(context);
  TF_ShapeInferenceContextSetOutput(context, 0, scalar, status);
  TF_DeleteShapeHandle(scalar);
}

__attribute__((constructor)) static void load() {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("ForebayPlusThousand");
  TF_OpDefinitionBuilderAddInput(op, "x: int64");
  TF_OpDefinitionBuilderAddOutput(op, "y: int64");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, &shape);
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder(
      "ForebayPlusThousand",
      TF_NewKernelBuilder("ForebayPlusThousand", "CPU", NULL, &compute, NULL), status);
  TF_DeleteStatus(status);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ops") / "plus_thousand.so"
    source = path.with_suffix(".cc")
    source.write_text(PLUS_THOUSAND)
    include = f"-I{tf.sysconfig.get_include()}"
    flags = ["-shared", "-fPIC", include, *tf.sysconfig.get_link_flags()]
    subprocess.run(["c++", str(source), "-o", str(path), *flags], check=True)
    return path


def test_workers_and_the_dispatcher_know_custom_ops(tmp_path: Path, library: Path) -> None:
    plus_thousand = tf.load_op_library(str(library)).forebay_plus_thousand
    how = {"load_op_library": library}
    with DispatcherProcess(tmp_path, **how) as dispatcher, WorkerProcess(dispatcher.address, **how):
        # How many splits this has, the dispatcher finds out for stock clients.
        dataset = tf.data.Dataset.range(plus_thousand(tf.constant(5, tf.int64))).map(plus_thousand)
        for client in (stock, service):
            mode = client.ShardingPolicy.DYNAMIC
            got = dataset.apply(client.distribute(mode, dispatcher.target))
            assert sorted(int(x) for x in got) == list(range(1000, 2005))
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        output = str(tmp_path / "output")
        command = ["-m", "forebay.service.cli", "materialize", dispatcher.target, dataset_id]
        writing = Fork([*command, "--output", output, "--load-op-library", str(library)])
        assert writing.finish() == 0
        assert len(require_complete(output)[1].whole) == 128


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    for name, why in (("none.so", "No such file"), ("text.so", "invalid ELF header|too short")):
        path = str(tmp_path / name)
        config = service.WorkerConfig("127.0.0.1:1", load_op_library=[path])
        with pytest.raises(InvalidArgument, match=rf"{name}.*({why}).*--load-op-library"):
            service.WorkerServer(config)
        # Which loads it only when it has to look into a graph, in another process.
        options = DispatcherOptions(load_op_library=(path,))
        why = "No such file|is no shared object"
        with pytest.raises(InvalidArgument, match=rf"{name}.*({why}).*--load-op-library"):
            asyncio.run(serve(options, print))


@pytest.mark.parametrize("inside", [True, False], ids=["in a function", "outside"])
def test_an_op_that_nobody_loaded_is_named(inside: bool) -> None:
    dataset = tf.data.Dataset.range(5).map(lambda x: tf.bitwise.invert(x))
    serialized = dataset._as_serialized_graph().numpy()
    parsed: Any = graph_pb2.GraphDef.FromString(serialized)
    nodes = [n for f in parsed.library.function for n in f.node_def] if inside else parsed.node
    node = next(n for n in nodes if n.op == ("Invert" if inside else "Const"))
    node.op = "NobodysOp"
    graph = parsed.SerializeToString()
    named = r"the custom op 'NobodysOp' is not known here: .*--load-op-library"
    with pytest.raises(PipelineError, match=f"NOT_FOUND: {named}"):
        list(TfDataPipeline(graph).run(None).blocks())
    if not inside:
        with pytest.raises(InvalidGraph, match=named):
            evaluate_in_subprocess(graph, [node.name])
