//! The `[adapter]` table: small matrices that are trained beside a frozen model. Absent, the model itself is trained.

use serde::{Serialize, Serializer};
use toml::Value;

use super::error::ConfigError;
use super::kind::{BETA, BOOL, Kind, POSITIVE, SIZE, TEXT, TEXTS};
use super::named::named;
use super::reader::Reader;
use super::table::table;
use super::written;

const TARGETS: Kind<Targets> = Kind {
    allowed: "\"all-linear\", or a list of names of modules, such as [\"q_proj\", \"v_proj\"]",
    read: targets,
};

table! {
    /// The `[adapter]` table. Keys are called as in PEFT's `LoraConfig`, where they are in it.
    pub struct AdapterConfig {
        /// What kind of adapter.
        kind: AdapterKind = named(AdapterKind::Lora),
        /// Rows of `A` and columns of `B`.
        rank: usize = or(SIZE, 8),
        /// The product is multiplied by `alpha / rank`.
        alpha: f64 = or(POSITIVE, 8.0),
        /// Probability of dropping an element of the input of `A`.
        dropout: f64 = or(BETA, 0.0),
        /// The linear maps that are adapted: all but the output head, or those whose name ends with one of these.
        target_modules: Targets = or(TARGETS, Targets::AllLinear),
        /// Modules that are trained whole, and saved beside the adapters.
        modules_to_save: Vec<String> = or(TEXTS, Vec::new()),
        /// Whether the product is multiplied by `alpha / sqrt(rank)` instead.
        rslora: bool = or(BOOL, false),
        /// The directory of an adapter in PEFT's format to begin with; none means a new one.
        path: Option<String> = or_none(TEXT),
        /// Whether the model with its adapters added is exported too.
        merge: bool = or(BOOL, false),
    }
}

/// The kinds of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// Low-rank (Hu et al., 2021).
    Lora,
}

named! {
    AdapterKind { "lora": Lora }
}

/// Which linear maps are adapted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All; an output head is none.
    AllLinear,
    /// Those that are called so, or whose name ends with `.` and this.
    Named(Vec<String>),
}

/// [`Targets::AllLinear`] as it is written.
pub(super) const ALL_LINEAR: &str = "all-linear";

fn targets(value: &Value) -> Option<Targets> {
    match value {
        Value::String(text) => (text == ALL_LINEAR).then_some(Targets::AllLinear),
        value => (TEXTS.read)(value).filter(|names| !names.is_empty()).map(Targets::Named),
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

impl AdapterConfig {
    /// What the product of an adapter is multiplied by.
    #[expect(clippy::cast_precision_loss, reason = "ranks are far below 2^53")]
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}
