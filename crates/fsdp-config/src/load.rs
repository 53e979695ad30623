//! Loads a run file as a [`Resolved`] configuration: parse, override, read, validate.

use std::path::Path;

use toml::{Table, Value};

use super::error::ConfigError;
use super::extends;
use super::fsdp_json;
use super::reader::{Origin, Reader};
use super::resolved::{Resolved, World};
use super::run::{RANKS_OF_DEVICE, RunConfig};
use super::validate::validate;
use super::warning::Warning;

/// A configuration that can be run, with warnings for the user.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The configuration.
    pub config: Resolved,
    /// Settings without the effect that one might expect.
    pub warnings: Vec<Warning>,
}

impl Resolved {
    /// Reads a run file, merged over the files that it extends. Each override is `table.key=value` and is applied
    /// before anything is checked.
    ///
    /// # Errors
    /// The first error found.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Loaded, ConfigError> {
        Self::load_for(path, overrides, &|_| World::of_ranks(1))
    }

    /// As [`Resolved::load`], but `world` determines from the `[run]` table what the file does not set: the number of
    /// ranks, and that of nodes.
    ///
    /// # Errors
    /// As [`Resolved::load`].
    pub fn load_for(
        path: &Path,
        overrides: &[String],
        world: &dyn Fn(&RunConfig) -> World,
    ) -> Result<Loaded, ConfigError> {
        Self::of_files(extends::read(path)?, overrides, world)
    }

    /// Reads what a run file says of the model and its update, for the judgement of a step whose batches come from elsewhere.
    /// The tables `[run]`, `[data]` and `[checkpoint]`, the sizes of
    /// batches and how parameters are sharded are not read, and may be missing.
    ///
    /// # Errors
    /// As [`Resolved::load`].
    pub fn load_for_audit(path: &Path, overrides: &[String]) -> Result<Loaded, ConfigError> {
        Self::of_audit_files(extends::read(path)?, overrides)
    }

    /// Parses the text of a run file for the judgement of a step; `origin` names it in errors.
    ///
    /// # Errors
    /// As [`Resolved::load`].
    pub fn parse_for_audit(text: &str, origin: &str) -> Result<Loaded, ConfigError> {
        let table = toml::from_str(text)
            .map_err(|source| ConfigError::Toml { origin: origin.to_owned(), source: Box::new(source) })?;
        Self::of_audit_files(vec![(origin.to_owned(), table)], &[])
    }

    fn of_audit_files(mut files: Vec<(String, Table)>, overrides: &[String]) -> Result<Loaded, ConfigError> {
        const SHARDING: [&str; 4] = ["frozen", "keep_f32", "param_dtype", "reduce_dtype"];
        for (_, table) in &mut files {
            ["run", "data", "checkpoint"].iter().for_each(|key| drop(table.remove(*key)));
            if let Some(Value::Table(fsdp)) = table.get_mut("fsdp") {
                fsdp.retain(|key, _| SHARDING.contains(&key));
            }
        }
        let own = [
            "run.ranks=1",
            "run.out_dir=none",
            "data.train=[\"none\"]",
            "data.seq_len=1",
            "train.micro_batch_size=1",
            "train.global_batch_size=1",
        ];
        let overrides: Vec<String> =
            own.map(str::to_owned).into_iter().chain(overrides.iter().cloned()).collect();
        Self::of_files(files, &overrides, &|_| World::of_ranks(1))
    }

    /// Parses the text of a run file; `origin` names it in errors. If the number of ranks is not set, it is 1.
    ///
    /// # Errors
    /// As [`Resolved::load`].
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Loaded, ConfigError> {
        let table = toml::from_str(text)
            .map_err(|source| ConfigError::Toml { origin: origin.to_owned(), source: Box::new(source) })?;
        Self::of_files(vec![(origin.to_owned(), table)], overrides, &|_| World::of_ranks(1))
    }

    /// Resolves files that were already read, the run file first.
    fn of_files(
        files: Vec<(String, Table)>,
        overrides: &[String],
        world: &dyn Fn(&RunConfig) -> World,
    ) -> Result<Loaded, ConfigError> {
        let mut table = extends::join(&files);
        let mut origin = Origin::new(files);
        for argument in overrides {
            let key = set(&mut table, argument)
                .ok_or_else(|| ConfigError::Override { argument: argument.clone() })?;
            origin.note_override(key);
        }
        let (replicas, mut warnings) = fsdp_json::fill_in(&mut table, &origin)?;
        let mut config = Resolved::read(&Reader::new(&origin, table))?;
        if config.run.ranks == RANKS_OF_DEVICE {
            config.run.ranks = world(&config.run).ranks;
        }
        if let Some(replicas) = replicas {
            let (replicate, warning) =
                replicas.count(World { ranks: config.run.ranks, ..world(&config.run) });
            config.fsdp.mesh.replicate = replicate;
            warnings.push(warning);
        }
        validate(&config, &origin, &mut warnings)?;
        // It agrees with the number of ranks, which may change when the run is resumed or planned for another cluster.
        config.fsdp.mesh.shard = None;
        // They stay the same where the axis changes.
        config.fsdp.chunks.context = Some(config.fsdp.chunks());
        config.fsdp.chunks.expert = Some(config.fsdp.expert_chunks());
        Ok(Loaded { config, warnings })
    }
}

/// Applies `table.key=value` and returns the key; `None` if the argument does not have that form or the key leads
/// through a value that is not a table.
///
/// A value that is not TOML is a string, so that `--set run.out_dir=runs/a` needs no quotes.
fn set<'a>(table: &mut Table, argument: &'a str) -> Option<&'a str> {
    let (key, value) = argument.split_once('=')?;
    let key = key.trim();
    let (tables, last) = key.rsplit_once('.')?;
    if key.split('.').any(str::is_empty) {
        return None;
    }
    let mut table = table;
    for name in tables.split('.') {
        let entry = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
        table = entry.as_table_mut()?;
    }
    table.insert(last.to_owned(), parse_value(value.trim()));
    Some(key)
}

fn parse_value(text: &str) -> Value {
    let parsed = toml::from_str::<Table>(&format!("value = {text}")).ok();
    let value = parsed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    value.unwrap_or_else(|| Value::String(text.to_owned()))
}
