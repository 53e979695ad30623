//! The `[fsdp]` table: units, policies, dtypes and the mesh.
//!
//! `config` names a Hugging Face `fsdp_config.json`; what it says is written out in the resolved
//! configuration, which therefore has no `config` key. A key of the run file wins over the JSON, with a
//! warning.

use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use super::error::ConfigError;
use super::fsdp_json::{self, FsdpJson};
use super::kind::{COUNT, Kind, POSITIVE_COUNT, SIZE, TEXT, TEXTS, one_of};
use super::patterns;
use super::reader::{Origin, Reader};
use super::warning::Warning;

const RESHARD: Kind<Reshard> = Kind {
    allowed: "true, false, \"auto\" or the size of the groups, an integer of at least 1",
    read: reshard,
};
const ACCUMULATION: Kind<Accumulation> = one_of("\"reduce\" or \"unsharded\"");
const ORDER: Kind<AccumulationOrder> = one_of("\"tree\" or \"running\"");
const DTYPE: Kind<Dtype> = one_of("\"f32\", \"bf16\" or \"f64\"");
const REDUCE_OP: Kind<ReduceOp> = one_of("\"sum\" or \"average\"");
const CHECKPOINTING: Kind<ActivationCheckpointing> = one_of("\"none\", \"selective\" or \"full\"");
const OFFLOAD: Kind<Offload> = one_of("\"none\" or \"cpu\"");
const KEYS: &[&str] = &[
    "wrap",
    "min_num_params",
    "config",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "accumulation",
    "accumulation_order",
    "param_dtype",
    "reduce_dtype",
    "reduce_op",
    "activation_checkpointing",
    "offload",
    "mesh",
    "frozen",
];

/// The `[fsdp]` table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FsdpConfig {
    /// Which modules become units; written as `wrap` or `min_num_params`.
    #[serde(flatten)]
    pub wrap: WrapPolicy,
    /// What happens to gathered parameters between forward and backward.
    pub reshard_after_forward: Reshard,
    /// Units gathered ahead in forward.
    pub forward_prefetch: u64,
    /// Units gathered ahead in backward.
    pub backward_prefetch: u64,
    /// Where the gradients of a step's micro-batches are added.
    pub accumulation: Accumulation,
    /// In which order they are added.
    pub accumulation_order: AccumulationOrder,
    /// What parameters are gathered and computed in.
    pub param_dtype: Dtype,
    /// What gradients are reduced in.
    pub reduce_dtype: Dtype,
    /// How the gradients of ranks are combined.
    pub reduce_op: ReduceOp,
    /// What backward recomputes.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Where shards, reduced gradients and optimizer state live.
    pub offload: Offload,
    /// The axes of the world.
    pub mesh: MeshConfig,
    /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that are not trained.
    pub frozen: Vec<String>,
}

/// Which modules become units, besides the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum WrapPolicy {
    /// Modules of these classes.
    #[serde(rename = "wrap")]
    Classes(Vec<String>),
    /// Modules with at least so many parameters that no inner unit owns.
    #[serde(rename = "min_num_params")]
    MinNumParams(u64),
}

/// What happens to gathered parameters between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshard {
    /// Kept.
    Never,
    /// Freed.
    Always,
    /// Kept in shards over groups of so many ranks.
    Groups(u64),
    /// Those of the root are kept, others freed.
    Auto,
}

/// Where the gradients of a step's micro-batches are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulation {
    /// In shards: a reduce-scatter for every micro-batch.
    Reduce,
    /// Unsharded: one reduce-scatter for the step.
    Unsharded,
}

/// In which order gradients are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccumulationOrder {
    /// Over a fixed binary tree: bits independent of the world.
    Tree,
    /// Into one accumulator, as they come.
    Running,
}

/// A floating-point type, by its name in the run file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE 754 double precision.
    F64,
}

impl From<Dtype> for fsdp_core::DType {
    fn from(dtype: Dtype) -> fsdp_core::DType {
        match dtype {
            Dtype::F32 => fsdp_core::DType::F32,
            Dtype::Bf16 => fsdp_core::DType::Bf16,
            Dtype::F64 => fsdp_core::DType::F64,
        }
    }
}

/// How the gradients of ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceOp {
    /// They are added.
    Sum,
    /// Each is multiplied by one over the number of ranks, rounded, then they are added.
    Average,
}

impl From<ReduceOp> for fsdp_core::comm::ReduceOp {
    fn from(op: ReduceOp) -> fsdp_core::comm::ReduceOp {
        match op {
            ReduceOp::Sum => fsdp_core::comm::ReduceOp::Sum,
            ReduceOp::Average => fsdp_core::comm::ReduceOp::Average,
        }
    }
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationCheckpointing {
    /// Nothing.
    None,
    /// The layers, but for the outputs of matrix products and of attention.
    Selective,
    /// The layers.
    Full,
}

/// Where shards, reduced gradients and optimizer state live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// In the device's memory.
    None,
    /// In host memory, where the update happens.
    Cpu,
}

/// The axes of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MeshConfig {
    /// Replicas (HSDP); the shard axis has `ranks / replicate` ranks.
    pub replicate: usize,
}

impl FsdpConfig {
    pub(super) fn read(
        origin: &Origin,
        table: Table,
        warnings: &mut Vec<Warning>,
    ) -> Result<FsdpConfig, ConfigError> {
        let reader = Reader::open(origin, "fsdp", table, KEYS)?;
        let json = match reader.optional("config", TEXT)? {
            Some(path) => fsdp_json::load(Path::new(&path))?,
            None => FsdpJson::default(),
        };
        warnings.extend(json.warnings.iter().cloned());
        let mut choice = Choice { reader: &reader, warnings };
        let mesh = Reader::open(origin, "fsdp.mesh", reader.table("mesh")?, &["replicate"])?;
        let offload = choice.of("offload", OFFLOAD, json.offload)?;
        let checkpointing =
            choice.of("activation_checkpointing", CHECKPOINTING, json.activation_checkpointing)?;
        Ok(FsdpConfig {
            wrap: read_wrap(&reader, json.wrap)?,
            reshard_after_forward: choice
                .of("reshard_after_forward", RESHARD, json.reshard_after_forward)?
                .unwrap_or(Reshard::Auto),
            forward_prefetch: reader.or("forward_prefetch", COUNT, 1)?,
            backward_prefetch: reader.or("backward_prefetch", COUNT, 1)?,
            accumulation: reader.or("accumulation", ACCUMULATION, Accumulation::Reduce)?,
            accumulation_order: reader.or("accumulation_order", ORDER, AccumulationOrder::Tree)?,
            param_dtype: choice.of("param_dtype", DTYPE, json.param_dtype)?.unwrap_or(Dtype::F32),
            reduce_dtype: choice.of("reduce_dtype", DTYPE, json.reduce_dtype)?.unwrap_or(Dtype::F32),
            reduce_op: reader.or("reduce_op", REDUCE_OP, ReduceOp::Sum)?,
            activation_checkpointing: checkpointing.unwrap_or(ActivationCheckpointing::None),
            offload: offload.unwrap_or(Offload::None),
            mesh: MeshConfig { replicate: mesh.or("replicate", SIZE, 1)? },
            frozen: patterns::read(&reader, "frozen")?,
        })
    }
}

/// The run file's word against the JSON's.
struct Choice<'a> {
    reader: &'a Reader<'a>,
    warnings: &'a mut Vec<Warning>,
}

impl Choice<'_> {
    fn of<T>(&mut self, key: &'static str, kind: Kind<T>, json: Option<T>) -> Result<Option<T>, ConfigError> {
        let written = self.reader.optional(key, kind)?;
        if written.is_some() && json.is_some() {
            self.warnings.push(Warning::Overridden { key: self.reader.dotted(key) });
        }
        Ok(written.or(json))
    }
}

fn read_wrap(reader: &Reader<'_>, json: Option<WrapPolicy>) -> Result<WrapPolicy, ConfigError> {
    let classes = reader.optional("wrap", TEXTS)?;
    let min_num_params = reader.optional("min_num_params", POSITIVE_COUNT)?;
    match (classes, min_num_params, json) {
        (Some(_), Some(_), _) => Err(reader.conflict(
            "wrap",
            "min_num_params",
            "choose units by class or by size, and remove the other",
        )),
        (Some(_), _, Some(_)) => Err(reader.conflict("wrap", "config", WRAP_TWICE)),
        (_, Some(_), Some(_)) => Err(reader.conflict("min_num_params", "config", WRAP_TWICE)),
        (Some(classes), None, None) => Ok(WrapPolicy::Classes(classes)),
        (None, Some(count), None) => Ok(WrapPolicy::MinNumParams(count)),
        (None, None, json) => Ok(json.unwrap_or(WrapPolicy::Classes(Vec::new()))),
    }
}

const WRAP_TWICE: &str = "the JSON file has a wrap policy of its own; remove one of the two";

fn reshard(value: &Value) -> Option<Reshard> {
    match value {
        Value::Boolean(true) => Some(Reshard::Always),
        Value::Boolean(false) => Some(Reshard::Never),
        Value::String(text) if text == "auto" => Some(Reshard::Auto),
        value => (POSITIVE_COUNT.read)(value).map(Reshard::Groups),
    }
}

impl Serialize for Reshard {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Reshard::Never => serializer.serialize_bool(false),
            Reshard::Always => serializer.serialize_bool(true),
            Reshard::Groups(ranks) => serializer.serialize_u64(*ranks),
            Reshard::Auto => serializer.serialize_str("auto"),
        }
    }
}
