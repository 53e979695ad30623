//! The `[adapter]` table: small trainable matrices next to a frozen model. Without it, the model itself is trained.

use serde::{Serialize, Serializer};
use toml::Value;

use super::describe::ValueSchema;
use super::error::ConfigError;
use super::kind::{BETA, BOOL, Kind, POSITIVE, SIZE, TEXT, TEXTS};
use super::named::{Named, named};
use super::reader::Reader;
use super::table::table;
use super::writer;

pub(super) const TARGETS: Kind<Targets> = Kind {
    allowed: "\"all-linear\", or a list of names of modules, such as [\"q_proj\", \"v_proj\"]",
    read: targets,
};

table! {
    /// The `[adapter]` table. Keys have the names of PEFT's `LoraConfig` where it has them.
    pub struct AdapterConfig {
        /// The kind of adapter.
        kind: AdapterKind = named(AdapterKind::Lora),
        /// Rows of `A` and columns of `B`.
        rank: usize = or(SIZE, 8),
        /// The product is multiplied by `alpha / rank`.
        alpha: f64 = or(POSITIVE, 8.0),
        /// Probability of dropping an element of the input of `A`.
        dropout: f64 = or(BETA, 0.0),
        /// Linear maps that get an adapter: all but the output head, or those whose name ends with one of these.
        target_modules: Targets = or(TARGETS, Targets::AllLinear),
        /// Stacked weights of experts that get an adapter for each expert: those whose name ends with one of these, such as
        /// "mlp.experts.gate_up_proj".
        target_parameters: Vec<String> = or(TEXTS, Vec::new()),
        /// Modules that are trained in full and saved with the adapters.
        modules_to_save: Vec<String> = or(TEXTS, Vec::new()),
        /// Whether the product is multiplied by `alpha / sqrt(rank)` instead.
        rslora: bool = or(BOOL, false),
        /// Whether adapters change directions only, and the length of every row of an adapted weight is trained by itself (DoRA).
        dora: bool = or(BOOL, false),
        /// Directory of a PEFT adapter to start from; none means a new adapter.
        path: Option<String> = or_none(TEXT),
        /// How the weights of the base are kept (QLoRA): as they are; in NF4, all linear maps with scales in 8 bits or in f32; or in
        /// MXFP4, those of experts.
        quantize: Quantize = named(Quantize::None),
        /// Whether to export the merged model, too.
        merge: bool = or(BOOL, false),
    }
}

/// The kinds of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// Low-rank adaptation (Hu et al., 2021).
    Lora,
}

named! {
    AdapterKind { "lora": Lora }
}

/// How the weights of a frozen base are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantize {
    /// In the dtype of the computation.
    None,
    /// In NF4 with double quantization: 4.1 bits per element.
    Nf4,
    /// In NF4 with scales in f32: 4.5 bits per element.
    Nf4Single,
    /// Experts in MXFP4, as gpt-oss is published: 4.25 bits per element.
    Mxfp4,
}

impl Quantize {
    /// The name in run files.
    pub fn name(self) -> &'static str {
        Named::name(self)
    }
}

named! {
    Quantize { "none": None, "nf4": Nf4, "nf4-single": Nf4Single, "mxfp4": Mxfp4 }
}

/// The linear maps that get an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All linear maps except an output head.
    AllLinear,
    /// Linear maps with one of these names, or whose name ends with `.` and one of these names.
    Named(Vec<String>),
}

/// How a run file writes [`Targets::AllLinear`].
pub(super) const ALL_LINEAR: &str = "all-linear";

fn targets(value: &Value) -> Option<Targets> {
    match value {
        Value::String(text) => (text == ALL_LINEAR).then_some(Targets::AllLinear),
        value => (TEXTS.read)(value).map(Targets::Named),
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Targets::AllLinear => serializer.serialize_str(ALL_LINEAR),
            Targets::Named(names) => names.serialize(serializer),
        }
    }
}

impl ValueSchema for Targets {
    fn of(_: &Kind<Targets>) -> serde_json::Value {
        serde_json::json!({"anyOf": [{"const": ALL_LINEAR}, ValueSchema::of(&TEXTS)]})
    }
}

impl AdapterConfig {
    /// The factor by which the product of an adapter's matrices is multiplied.
    #[expect(clippy::cast_precision_loss, reason = "ranks are far below 2^53")]
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}
