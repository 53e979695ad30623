//! Hugging Face's `fsdp_config.json`, as `Trainer` reads it (reference: transformers 4.31 and 5.23).
//!
//! A leading `fsdp_` is dropped from every top-level key. Keys that Hugging Face silently ignores are reported as a
//! [`Warning`], and so are keys that it reads and that change nothing here, with the reason, and what was made of a
//! sharding strategy. What it rejects is an error, and so is a size together with classes if no `auto_wrap_policy`
//! chooses, where its newer versions silently use the size. Settings of the XLA constructor that only steer XLA's compiler
//! have no meaning here.

mod overlap;
mod parallelism;
mod strategy;
mod wrap;
mod xla;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use toml::Table;

pub(super) use self::strategy::Replicas;
use self::strategy::{ReshardAfterForward, Strategy};
use super::error::ConfigError;
use super::kind::TEXT;
use super::reader::{Origin, Reader};
use super::warning::Warning;
use crate::input_file::{self, CONFIG_BYTES_MAX};

/// The keys of `[fsdp]` that set the wrap policy.
const WRAP: [&str; 2] = ["wrap", "min_num_params"];
const STRATEGY: &str = "sharding_strategy";
const RESHARD: &str = "reshard_after_forward";
/// The key of `[fsdp]` that holds the mesh.
const MESH: &str = "mesh";
/// The key under which the configuration of `accelerate launch` holds all others.
const OF_ACCELERATE: &str = "fsdp_config";

/// The key of `accelerate launch` for the sizes of its mesh.
const PARALLELISM: &str = "parallelism_config";

/// Keys that transformers or accelerate read, and that change nothing here.
const WITHOUT_EFFECT: [(&str, &str); 26] = [
    ("mixed_precision", DTYPES),
    ("mixed_precision_policy", DTYPES),
    ("downcast_bf16", DTYPES),
    ("fp8_config", DTYPES),
    ("version", "both versions of FSDP compute the same"),
    ("use_orig_params", "parameters always keep their own names and shapes"),
    ("sync_module_states", "all ranks begin with rows of one model in any case"),
    ("cpu_ram_efficient_loading", "every rank reads only its own rows in any case"),
    ("limit_all_gathers", "fsdp.forward_prefetch and fsdp.backward_prefetch bound the gathers in flight"),
    ("state_dict_type", CHECKPOINTS),
    ("state_dict_config", CHECKPOINTS),
    ("optim_state_dict_config", CHECKPOINTS),
    ("param_init_fn", "every rank computes or reads only its own rows in any case"),
    ("ignored_modules", "all parameters are sharded; fsdp.frozen names those that are not trained"),
    ("xla_fsdp_v2", "both implementations of XLA compute the same"),
    ("activation_checkpointing_offload", "inputs of recomputed layers stay on the device"),
    ("distributed_type", "every run is sharded as [fsdp] says"),
    ("num_processes", "the launcher and run.ranks set the number of ranks"),
    ("num_machines", LAUNCHER),
    ("machine_rank", LAUNCHER),
    ("main_process_ip", LAUNCHER),
    ("main_process_port", LAUNCHER),
    ("rdzv_backend", LAUNCHER),
    ("gpu_ids", LAUNCHER),
    ("use_cpu", "run.device sets the device"),
    ("gradient_accumulation_steps", "train.global_batch_size and train.micro_batch_size set the number"),
];

const DTYPES: &str = "fsdp.param_dtype and fsdp.reduce_dtype set the dtypes";
const CHECKPOINTS: &str = "checkpoints are always sharded; `fsdp ckpt convert` writes other forms";
const LAUNCHER: &str = "the launcher sets it (`fsdp launch`, torchrun, mpirun or srun)";

/// The contents of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FsdpJson {
    /// The settings, as keys of `[fsdp]`.
    keys: Table,
    /// The mesh that a strategy asks for.
    replicas: Option<Replicas>,
    /// Keys that have no effect.
    warnings: Vec<Warning>,
}

/// If `[fsdp]` names such a file, copies its settings into the table. A key of the run file overrides them, with a
/// warning, but only one of the two files may set a wrap policy. Also returns the mesh that is still to be set, whose size
/// is not known before the number of ranks is.
///
/// # Errors
/// If the file cannot be read, is not a JSON object, or breaks a rule; [`ConfigError::Conflict`] if both files set a
/// wrap policy.
pub(super) fn fill_in(
    file: &mut Table,
    origin: &Origin,
) -> Result<(Option<Replicas>, Vec<Warning>), ConfigError> {
    let path = |fsdp: &Reader<'_>| fsdp.optional("config", TEXT);
    let Some(path) = Reader::new(origin, file.clone()).table("fsdp", path)? else {
        return Ok((None, Vec::new()));
    };
    let text = input_file::read_text(Path::new(&path), CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Read { file: path.clone().into(), source })?;
    let FsdpJson { keys, mut replicas, mut warnings } = parse(&text, &path)?;
    let fsdp = file["fsdp"].as_table_mut().expect("a key of it was read");
    let is_wrap = |key: &&str| WRAP.contains(key);
    let written = fsdp.keys().map(String::as_str).find(is_wrap);
    if let (Some(written), Some(_)) = (written, keys.keys().map(String::as_str).find(is_wrap)) {
        let remedy = "the JSON file has a wrap policy of its own; remove one of the two";
        let (first, second) = (format!("fsdp.{written}"), "fsdp.config".to_owned());
        return Err(ConfigError::Conflict { origin: origin.of(&second), first, second, remedy });
    }
    for (key, value) in keys {
        if fsdp.contains_key(&key) {
            warnings.push(Warning::Overridden { key: format!("fsdp.{key}") });
        } else {
            fsdp.insert(key, value);
        }
    }
    if replicas.is_some() && fsdp.contains_key(MESH) {
        replicas = None;
        warnings.push(Warning::Overridden { key: format!("fsdp.{MESH}") });
    }
    Ok((replicas, warnings))
}

/// Parses the text of a file; `origin` names it in errors and warnings.
///
/// # Errors
/// If it is not a JSON object, or breaks a rule.
fn parse(text: &str, origin: &str) -> Result<FsdpJson, ConfigError> {
    let mut object: Map<String, Value> = serde_json::from_str(text)
        .map_err(|source| ConfigError::Json { origin: origin.to_owned(), source })?;
    // The configuration of `accelerate launch` holds these keys in one of its own, beside others.
    let mut around = Map::new();
    if let Some(Value::Object(_)) = object.get(OF_ACCELERATE) {
        let Some(Value::Object(inner)) = object.remove(OF_ACCELERATE) else {
            unreachable!("it was just seen")
        };
        around = std::mem::replace(&mut object, inner);
    }
    let mut file = File { origin, keys: without_prefix(object, origin)?, result: FsdpJson::default() };
    if let Some(config) = around.remove(PARALLELISM) {
        file.keys.insert(PARALLELISM.to_owned(), config);
    }
    around.into_iter().for_each(|(key, _)| file.warn_unread(key));
    file.parallelism()?;
    file.wrap()?;
    file.top_level()?;
    file.overlap()?;
    file.xla()?;
    // A number says more than "one replica for each node", and contradicts "one for each rank".
    let counted = file.result.keys.contains_key(MESH);
    if file.result.replicas.take_if(|_| counted) == Some(Replicas::Ranks) {
        return Err(ConfigError::Conflict {
            origin: origin.to_owned(),
            first: STRATEGY.to_owned(),
            second: format!("{PARALLELISM}.{}", parallelism::REPLICAS),
            remedy: "with NO_SHARD, every rank holds a replica; remove one of the two",
        });
    }
    std::mem::take(&mut file.keys).into_keys().for_each(|key| file.warn_unread(key));
    Ok(file.result)
}

fn without_prefix(object: Map<String, Value>, origin: &str) -> Result<BTreeMap<String, Value>, ConfigError> {
    let mut keys = BTreeMap::new();
    for (written, value) in object {
        let key = written.strip_prefix("fsdp_").unwrap_or(&written).to_owned();
        if keys.insert(key.clone(), value).is_some() {
            return Err(ConfigError::Conflict {
                origin: origin.to_owned(),
                first: key.clone(),
                second: format!("fsdp_{key}"),
                remedy: "they are the same key; remove one of the two",
            });
        }
    }
    Ok(keys)
}

/// The keys that are left to read, and the result so far.
struct File<'a> {
    origin: &'a str,
    keys: BTreeMap<String, Value>,
    result: FsdpJson,
}

impl File<'_> {
    fn set(&mut self, key: &str, value: impl Into<toml::Value>) {
        self.result.keys.insert(key.to_owned(), value.into());
    }

    /// Reads the keys outside of XLA's that have a counterpart.
    fn top_level(&mut self) -> Result<(), ConfigError> {
        self.resharding()?;
        self.set_from_bool(
            "activation_checkpointing",
            "activation_checkpointing",
            ["none".into(), "full".into()],
        )?;
        self.offloading()
    }

    /// Reads accelerate's and transformers' key of the same.
    fn offloading(&mut self) -> Result<(), ConfigError> {
        let [by_accelerate, by_transformers] = ["offload_params", "cpu_offload"];
        let [first, second] = [self.take_bool(by_accelerate)?, self.take_bool(by_transformers)?];
        if first.zip(second).is_some_and(|(first, second)| first != second) {
            return Err(ConfigError::Conflict {
                origin: self.origin.to_owned(),
                first: by_accelerate.to_owned(),
                second: by_transformers.to_owned(),
                remedy: "they mean the same; remove one of the two",
            });
        }
        if let Some(is_on) = first.or(second) {
            self.set("offload", if is_on { "cpu" } else { "none" });
        }
        Ok(())
    }

    /// Reads the strategy, from either of its keys. If both are there, they must agree: which one counts depends on the
    /// version of FSDP, whose default is not the same in accelerate and in transformers.
    fn resharding(&mut self) -> Result<(), ConfigError> {
        let strategy = self.take(STRATEGY, strategy::ALLOWED, Strategy::read)?;
        let allowed = format!("true, false, {}", strategy::ALLOWED);
        let reshard = self.take(RESHARD, &allowed, ReshardAfterForward::read)?;
        let agree = |strategy: Strategy| match reshard {
            None => true,
            Some(ReshardAfterForward::Is(reshards)) => reshards == strategy.reshards(),
            Some(ReshardAfterForward::Of(other)) => other == strategy,
        };
        if strategy.is_some_and(|strategy| !agree(strategy)) {
            return Err(ConfigError::Conflict {
                origin: self.origin.to_owned(),
                first: STRATEGY.to_owned(),
                second: RESHARD.to_owned(),
                remedy: "they ask for different strategies; remove one of the two",
            });
        }
        let named = match reshard {
            Some(ReshardAfterForward::Of(strategy)) => Some((RESHARD, strategy)),
            _ => strategy.map(|strategy| (STRATEGY, strategy)),
        };
        if let Some((key, strategy)) = named {
            self.result.replicas = strategy.replicas();
            let (file, settings) = (self.origin.to_owned(), strategy.settings());
            self.result.warnings.push(Warning::Strategy { file, key, strategy: strategy.name(), settings });
        }
        let reshards = match (named, reshard) {
            (Some((_, strategy)), _) => Some(strategy.reshards()),
            (None, Some(ReshardAfterForward::Is(reshards))) => Some(reshards),
            (None, _) => None,
        };
        if let Some(reshards) = reshards {
            self.set(RESHARD, if reshards { toml::Value::from("auto") } else { false.into() });
        }
        Ok(())
    }

    /// Reads a boolean that selects one of two values for a key of `[fsdp]`.
    fn set_from_bool(
        &mut self,
        from: &str,
        key: &str,
        [off, on]: [toml::Value; 2],
    ) -> Result<(), ConfigError> {
        if let Some(is_on) = self.take_bool(from)? {
            self.set(key, if is_on { on } else { off });
        }
        Ok(())
    }

    fn take_bool(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.take(key, "true or false", boolean)
    }

    fn take<T>(
        &mut self,
        key: &str,
        allowed: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.keys.remove(key).filter(|value| !value.is_null()) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| ConfigError::Value {
            origin: self.origin.to_owned(),
            key: key.to_owned(),
            value: value.to_string(),
            allowed: allowed.to_owned(),
        })
    }

    /// Says what is made of a key that no other part has read.
    fn warn_unread(&mut self, key: String) {
        match WITHOUT_EFFECT.iter().find(|(known, _)| *known == key) {
            Some((key, why)) => self.warn_no_effect(key, why),
            None => self.warn_meaningless(key),
        }
    }

    fn warn_meaningless(&mut self, key: String) {
        self.result.warnings.push(Warning::Meaningless { file: self.origin.to_owned(), key });
    }

    fn warn_no_effect(&mut self, key: &'static str, why: &'static str) {
        self.result.warnings.push(Warning::NoEffect { file: self.origin.to_owned(), key, why });
    }

    fn warn_needs(&mut self, key: &'static str, needs: &'static str) {
        self.result.warnings.push(Warning::Needs { file: self.origin.to_owned(), key, needs });
    }
}

/// Reads a boolean in the forms that accelerate takes: it makes text of the value, and reads that.
fn boolean(value: &Value) -> Option<bool> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned).to_ascii_lowercase();
    match text.as_str() {
        "true" | "1" | "yes" | "y" | "t" | "on" => Some(true),
        "false" | "0" | "no" | "n" | "f" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
