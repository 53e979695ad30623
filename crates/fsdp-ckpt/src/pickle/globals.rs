//! The closed table of classes and functions that checkpoint formats name.
//!
//! An entry records how a pickle may use the name: call it (REDUCE), make an object of it (NEWOBJ), or set the state of
//! such an object (BUILD). All of these only describe data. An entry with no use is a constant, such as a dtype. A name
//! that is not in the table is opaque, since its meaning is unknown.

use crate::checkpoint::Global;

/// The name may be called.
const CALL: u8 = 1;
/// Objects of the class may be made.
const NEW: u8 = 2;
/// Objects of the class may be given a state.
const STATE: u8 = 4;
/// The uses of dataclasses and plain classes.
const CLASS: u8 = NEW | STATE;
/// The class is an enum, whose members are pickled as a call with the value, or as `getattr` with the name.
const ENUM: u8 = CALL | 8;

/// Modules, names in these modules, and how the names may be used.
type Entry = (&'static [&'static str], &'static [&'static str], u8);

const BUILTINS: &[&str] = &["builtins", "__builtin__"];
const TORCH: &[&str] = &["torch"];
const UTILS: &[&str] = &["torch._utils"];
/// Metadata of distributed checkpoints.
const METADATA: &[&str] = &["torch.distributed.checkpoint.metadata"];
/// Sharded tensors of FSDP1.
const SHARDED: &[&str] = &["torch.distributed._shard.sharded_tensor.metadata"];
const SHARDED_API: &[&str] = &["torch.distributed._shard.sharded_tensor.api"];
const SHARDED_TENSOR: &[&str] = &["torch.distributed._shard.sharded_tensor"];
const SHARD: &[&str] = &["torch.distributed._shard.sharded_tensor.shard"];
const SHARDING_SPEC: &[&str] = &[
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec",
    "torch.distributed._shard.sharding_spec.api",
    "torch.distributed._shard.sharding_spec",
];
/// Distributed tensors; their modules moved several times.
const DTENSOR: &[&str] = &[
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
];
const DTENSOR_SPEC: &[&str] = &[
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed._tensor._dtensor_spec",
    "torch.distributed._tensor.placement_types",
    "torch.distributed.tensor.placement_types",
];
const PLACEMENTS: &[&str] =
    &["torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"];
const MESH: &[&str] = &["torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh"];
const OFFLOAD: &[&str] = &["deepspeed.runtime.zero.offload_config"];
const FRAGMENTS: &[&str] = &["deepspeed.utils.tensor_fragment", "deepspeed.utils"];
const PARTITIONS: &[&str] = &["deepspeed.runtime.zero.partition_parameters"];

const TABLE: &[Entry] = &[
    // Python itself.
    (BUILTINS, &["set", "frozenset", "bytearray", "complex", "getattr", "slice", "range"], CALL),
    (BUILTINS, &["list", "dict"], CALL),
    (BUILTINS, &["int", "float", "bool", "str"], 0),
    (&["_codecs"], &["encode"], CALL),
    (&["collections"], &["OrderedDict"], CALL | STATE),
    (&["collections"], &["Counter", "defaultdict"], CALL),
    (&["pathlib", "pathlib._local"], &["PosixPath", "WindowsPath", "Path"], CALL),
    (&["pathlib", "pathlib._local"], &["PurePosixPath", "PureWindowsPath"], CALL),
    (&["argparse"], &["Namespace"], CLASS),
    (&["types"], &["SimpleNamespace"], CALL | CLASS),
    // Types of elements.
    (TORCH, &["float64", "float32", "float16", "bfloat16", "bool"], 0),
    (TORCH, &["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"], 0),
    (TORCH, &["complex128", "complex64", "complex32"], 0),
    (TORCH, &["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"], 0),
    (TORCH, &["float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8", "qint32"], 0),
    // Storages.
    (TORCH, &["DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "BoolStorage"], 0),
    (TORCH, &["LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage"], 0),
    (TORCH, &["ComplexDoubleStorage", "ComplexFloatStorage"], 0),
    (TORCH, &["QUInt8Storage", "QInt8Storage", "QInt32Storage"], 0),
    (&["torch.storage"], &["UntypedStorage", "TypedStorage", "_UntypedStorage"], 0),
    // Tensors.
    (TORCH, &["strided", "contiguous_format", "preserve_format", "channels_last"], 0),
    (TORCH, &["Size", "device"], CALL),
    (TORCH, &["Tensor"], 0),
    (&["torch.nn.parameter"], &["Parameter", "Buffer"], 0),
    (&["torch.serialization"], &["_get_layout"], CALL),
    (UTILS, &["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"], CALL),
    (UTILS, &["_rebuild_parameter", "_rebuild_parameter_with_state"], CALL),
    (UTILS, &["_rebuild_sparse_tensor", "_rebuild_nested_tensor", "_rebuild_qtensor"], CALL),
    (UTILS, &["_rebuild_meta_tensor_no_storage"], CALL),
    (UTILS, &["_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor"], CALL),
    (UTILS, &["_rebuild_wrapper_subclass"], 0),
    (&["torch._tensor"], &["_rebuild_from_type_v2"], CALL),
    // Distributed checkpoints.
    (METADATA, &["Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"], CLASS),
    (METADATA, &["TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"], CLASS),
    (METADATA, &["_MEM_FORMAT_ENCODING"], ENUM),
    (&["torch.distributed.checkpoint.filesystem"], &["_StorageInfo"], CLASS),
    // Sharded tensors.
    (SHARDED, &["MEM_FORMAT_ENCODING"], ENUM),
    (SHARDED, &["TensorProperties", "ShardedTensorMetadata"], CLASS),
    (SHARDED_API, &["ShardedTensor", "ShardedTensor.ProcessGroupState"], CLASS),
    (SHARDED_TENSOR, &["ShardedTensor"], CLASS),
    (SHARD, &["Shard"], CLASS),
    (&["torch.distributed._shard.metadata"], &["ShardMetadata"], CLASS),
    (SHARDING_SPEC, &["ChunkShardingSpec", "EnumerableShardingSpec"], CLASS),
    (&["torch.distributed.remote_device"], &["_remote_device"], CLASS),
    // Distributed tensors.
    (DTENSOR, &["DTensor"], 0),
    (DTENSOR_SPEC, &["DTensorSpec", "TensorMeta", "ShardOrderEntry"], CALL | CLASS),
    (PLACEMENTS, &["Shard", "_StridedShard", "Replicate"], CALL | CLASS),
    (PLACEMENTS, &["Partial", "_Partial", "MaskPartial"], CALL | CLASS),
    (MESH, &["DeviceMesh"], CLASS),
    (&["torch.distributed._mesh_layout"], &["_MeshLayout"], CALL | CLASS),
    // Random states as trainers save them.
    (&["numpy.core.multiarray", "numpy._core.multiarray"], &["_reconstruct", "scalar"], CALL | STATE),
    (&["numpy._core.numeric", "numpy.core.numeric"], &["_frombuffer"], CALL),
    (&["numpy"], &["ndarray"], 0),
    (&["numpy"], &["dtype"], CALL | STATE),
    // Values in DeepSpeed's files other than tensors.
    (&["deepspeed.runtime.fp16.loss_scaler"], &["LossScaler", "DynamicLossScaler"], CALL | CLASS),
    (&["deepspeed.runtime.zero.config"], &["ZeroStageEnum"], ENUM),
    (&["deepspeed.runtime.zero.config"], &["DeepSpeedZeroConfig"], CLASS),
    (OFFLOAD, &["DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig"], CLASS),
    (OFFLOAD, &["OffloadDeviceEnum"], ENUM),
    (FRAGMENTS, &["fragment_address", "tensor_fragment"], CALL | CLASS),
    (PARTITIONS, &["ZeroParamStatus", "ZeroParamType"], ENUM),
];

/// A name in the table, as indices of the entry, the module and the name in the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    entry: u8,
    module: u8,
    name: u8,
}

impl Known {
    /// Finds a name in the table.
    pub(super) fn find(module: &str, name: &str) -> Option<Known> {
        let place = |at: usize| u8::try_from(at).expect("the table is small");
        TABLE.iter().enumerate().find_map(|(entry, (modules, names, _))| {
            let module = modules.iter().position(|known| *known == module)?;
            let name = names.iter().position(|known| *known == name)?;
            Some(Known { entry: place(entry), module: place(module), name: place(name) })
        })
    }

    /// Whether this is the given name of the given module.
    pub(crate) fn is(self, module: &str, name: &str) -> bool {
        self.name() == name && self.module() == module
    }

    /// The module.
    pub(crate) fn module(self) -> &'static str {
        TABLE[usize::from(self.entry)].0[usize::from(self.module)]
    }

    /// The name in the module.
    pub(crate) fn name(self) -> &'static str {
        TABLE[usize::from(self.entry)].1[usize::from(self.name)]
    }

    fn uses(self) -> u8 {
        TABLE[usize::from(self.entry)].2
    }

    /// Whether it may be called.
    pub(super) fn may_be_called(self) -> bool {
        self.uses() & CALL != 0
    }

    /// Whether it is an enum.
    pub(super) fn is_enumeration(self) -> bool {
        self.uses() & ENUM == ENUM
    }

    /// Whether objects of it may be made.
    pub(super) fn may_be_made(self) -> bool {
        self.uses() & NEW != 0
    }

    /// Whether its objects may be given a state.
    pub(super) fn may_have_state(self) -> bool {
        self.uses() & STATE != 0
    }

    /// Module and name joined by a dot, for messages.
    pub(crate) fn path(self) -> String {
        format!("{}.{}", self.module(), self.name())
    }

    /// Converts the name to a value.
    pub(crate) fn to_global(self) -> Global {
        Global { module: self.module().to_owned(), name: self.name().to_owned() }
    }
}
