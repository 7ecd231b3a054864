"""Writes service/pipelines/tf_data/operations.txt: what graphs of the role `trainer` may have.

These are the operations of the installed TensorFlow that keep to themselves: all that it declares
stateless, but for OUT, and the stateful ones of STATEFUL. Whoever adds to them looks for files,
sockets, other processes' state, code that an attribute or a tensor brings along, and what a process
prints: others read its log and its standard output.
"""

from __future__ import annotations

import fnmatch
import pathlib
import textwrap

PATH = pathlib.Path(__file__).parent.parent / "service/pipelines/tf_data/operations.txt"

MEANT = {"SnapshotChunkDataset"}  # of Dataset.load, beside the others of its name

OUT = [
    # They read files, or map them.
    *("ReadFile", "ImmutableConst", "GenerateVocabRemapping", "InitializeTableFromTextFile"),
    *("Snapshot*Dataset*", "EncodeProto", "DecodeProtoV2"),  # the latter have paths of descriptors
    # They write files or to sockets, or end the process.
    *("Debug*", "Copy", "CopyHost", "Abort", "CustomAggregator"),
    # They run what comes as a string, or elsewhere.
    *("DatasetFromGraph", "DatasetToGraph*", "PyFuncStateless", "Optimize*", "*RegisterDataset*"),
    *("Xla*", "TPU*", "Tpu*", "SymbolicGradient", "BatchFunction", "DTensor*", "MlirPassthroughOp"),
    # Nothing of an input pipeline: training, accelerators, other programs' queues, TensorFlow's own
    # rewriting and its tests.
    *("_*", "Apply*", "SparseApply*", "Scatter[ADMSU]*", "Assign*", "BoostedTrees*", "Cudnn*"),
    *("Sdca*", "Risc*", "Infeed*", "Outfeed*", "Prelinearize*", "Queue*", "Reader*", "Barrier*"),
    *("*Accumulator*Gradient*", "AccumulatorSet*", "AccumulatorNum*", "LookupTable*", "Quantized*"),
    *("InitializeTable", "Ref*", "Stack*", "TensorArray*", "Batch", "Unbatch", "UnbatchGrad"),
    *("Attr*", "*Summary*", "Foo?", "NInTw*", "NInts*", "NIntsIn*", "NIntsOut*", "NPolymorphic*"),
    *(
        "FloatInput",
        "Int*Input",
        "RefIn*",
        "InPolymorphicTwice",
        "IntAttr",
        "Int*Output*",
        "Float*Output*",
        "FiveFloatOutputs",
    ),
    *(
        "TwoFloat*",
        "TwoInt*",
        "TwoRefsIn",
        "TypeList*",
        "OutT*",
        "Old",
        "NInPoly*",
        "None",
        "Namespace*",
    ),
    *("Simple*", "ComplexStruct", "MixedStruct", "ListInput", "ListOutput", "ConstructionFails"),
    *("KernelLabel*", "Polymorphic*", "Reserved*", "Restrict", "Func*Attr", "StringListAttr"),
    *(
        "TestStringOutput",
        "DefaultAttrs",
        "OpWith*",
        "CopyOp",
        "A",
        "B",
        "Binary",
        "Unary",
        "Copy*",
    ),
    *("*SparseCore*", "GetTpuTaskId", "GetStatsFrom*", "*DedupData", "Relayout*", "HostConst"),
]

STATEFUL = """
AnonymousHashTable AnonymousIteratorV2 AnonymousIteratorV3 AnonymousMemoryCache
AnonymousMutableDenseHashTable AnonymousMutableHashTable AnonymousMutableHashTableOfTensors
AnonymousRandomSeedGenerator AnonymousSeedGenerator Assert AssignAddVariableOp AssignSubVariableOp
AssignVariableOp CSVDataset CSVDatasetV2 CacheDatasetV2 Case CheckNumerics CheckNumericsV2
DatasetToSingleElement DeepCopy DeleteIterator DeleteMemoryCache DeleteRandomSeedGenerator
DeleteSeedGenerator DestroyResourceOp DummyIterationCounter DummyMemoryCache DummySeedGenerator
Empty ExperimentalCSVDataset ExperimentalGroupByReducerDataset ExperimentalMatchingFilesDataset
ExperimentalRandomDataset ExperimentalThreadPoolDataset ExperimentalThreadPoolHandle
FixedLengthRecordDataset FixedLengthRecordDatasetV2 GeneratorDataset GlobalShuffleDataset
GroupByReducerDataset GuaranteeConst HashTable HashTableV2 If InitializeTableFromDataset
InitializeTableV2 IteratorGetNext IteratorGetNextAsOptional IteratorGetNextSync ListDataset
ListSnapshotChunksDataset LoadDataset LogUniformCandidateSampler LookupTableExportV2
LookupTableFindV2 LookupTableImportV2 LookupTableInsertV2 LookupTableRemoveV2 LookupTableSizeV2
MakeIterator MatchingFilesDataset Multinomial MutableDenseHashTable MutableDenseHashTableV2
MutableHashTable MutableHashTableOfTensors MutableHashTableOfTensorsV2 MutableHashTableV2
NonDeterministicInts ParameterizedTruncatedNormal RandomCrop RandomDataset
RandomDatasetV2 RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle RandomStandardNormal
RandomUniform RandomUniformInt RangeDataset ReadVariableOp ReduceDataset ResourceGather
ResourceGatherNd ResourceScatterAdd ResourceScatterNdAdd ResourceScatterNdUpdate
ResourceScatterUpdate RngReadAndSkip RngSkip SampleDistortedBoundingBox SampleDistortedBoundingBoxV2
ShuffleAndRepeatDatasetV2 ShuffleDatasetV2 ShuffleDatasetV3 Skipgram SparseTensorSliceDataset
StatefulPartitionedCall StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2
StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
StatelessRandomGetAlg TFRecordDataset TFRecordDatasetV2 TensorArrayCloseV3 TensorArrayConcatV3
TensorArrayGatherV3 TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3 TensorArraySplitV3
TensorArrayV3 TensorArrayWriteV3 TensorDataset TensorSliceDataset TextLineDataset ThreadPoolDataset
ThreadPoolHandle Timestamp TruncatedNormal UniformCandidateSampler VarHandleOp VarIsInitializedOp
VariableShape While _Retval
"""


def text() -> str:
    """The file's content. Imports TensorFlow."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    listed = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    known = {op.name: op.is_stateful for op in op_def_pb2.OpList.FromString(listed).op}
    stateful = set(STATEFUL.split())
    if missing := stateful - {name for name, is_stateful in known.items() if is_stateful}:
        raise SystemExit(f"not among TensorFlow's stateful operations: {sorted(missing)}")
    kept = [name for name, is_stateful in known.items() if not is_stateful]
    out = {name for pattern in OUT for name in fnmatch.filter(kept, pattern)}
    names = sorted(({*kept, *stateful} - out) | MEANT)
    return textwrap.fill(" ".join(names), 100, break_long_words=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
