//! `fsdp ckpt convert`: converts between all formats.

use std::num::NonZero;

use fsdp_ckpt::checkpoint::{Checkpoint, Experts, Role};
use fsdp_ckpt::conversion::{
    Conversion, ConversionReport, Target, convert, expert_names, expert_names_beside,
};
use fsdp_ckpt::formats::beside;
use fsdp_ckpt::transfer::Options;
use serde_json::{Value as Json, json};

use super::shared::{Work, is_in, json_path, listed, notes_of, opaque_json, open};
use crate::args::{ConvertArgs, ExpertsArg, target_name};
use crate::document::{Document, Mark, Report, print};
use crate::error::CliError;
use crate::units::{bytes, counted};

/// Converts a checkpoint and prints what was done.
///
/// # Errors
/// [`CliError`]: the options make no sense, the source is damaged, the destination exists or cannot be written, or
/// the user interrupted. Nothing is left behind.
pub(super) fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let work = Work::begin(args.memory)?;
    let checkpoint = open(&args.source, &args.reading)?;
    let conversion = conversion(args, &checkpoint)?;
    let report = work.run(|options| {
        let options = Options { sync: !args.no_sync, ..*options };
        convert(&checkpoint, &args.destination, &conversion, &options)
    })?;
    let others = beside(&checkpoint).checkpoints;
    let summary = Summary {
        args,
        checkpoint: &checkpoint,
        left_out: left_out(&checkpoint, &conversion),
        not_converted: others.iter().map(|other| other.path.display().to_string()).collect(),
        report,
    };
    print(&summary, args.json)
}

/// Translates the options of a conversion of `checkpoint`.
fn conversion(args: &ConvertArgs, checkpoint: &Checkpoint) -> Result<Conversion, CliError> {
    let inapplicable = |option, targets: &str| {
        let what =
            format!("it does not apply to --to {}, only to {targets}; leave it out", target_name(args.to));
        Err(CliError::Option { option, what })
    };
    if args.world_size.is_some() && !matches!(args.to, Target::Dcp | Target::Native) {
        return inapplicable("--world-size", "dcp and native");
    }
    if args.max_shard_size.is_some() && args.to != Target::Safetensors {
        return inapplicable("--max-shard-size", "safetensors");
    }
    let names = args.experts.is_some() || checkpoint.has_megatron_names();
    if args.config.is_some() && args.to != Target::Safetensors && !names {
        return inapplicable("--config", "safetensors, with --experts, or from Megatron's names");
    }
    if args.layout.is_some() && !matches!(args.to, Target::Dcp | Target::Torch) {
        return inapplicable("--layout", "dcp and torch");
    }
    let mut conversion = Conversion::new(args.to);
    conversion.world_size = args.world_size.and_then(NonZero::new).unwrap_or(NonZero::<usize>::MIN);
    conversion.shard_bytes_max = args.max_shard_size.unwrap_or(conversion.shard_bytes_max);
    conversion.dtype = args.dtype;
    conversion.part = args.only.unwrap_or(conversion.part);
    conversion.layout = args.layout;
    conversion.tied = args.tied;
    conversion.experts = args.experts.map(|form| experts(form, args)).transpose()?;
    conversion.strip_wrappers = args.strip_wrappers;
    conversion.strip_prefix.clone_from(&args.strip_prefix);
    conversion.renames.clone_from(&args.rename);
    conversion.config.clone_from(&args.config);
    Ok(conversion)
}

/// The form of experts to write.
fn experts(form: ExpertsArg, args: &ConvertArgs) -> Result<Experts, CliError> {
    // Where the family is known, it must be one whose experts are stacked.
    let names = match &args.config {
        Some(config) => Some(expert_names(config)?),
        None => expert_names_beside(&args.source)?,
    };
    if form == ExpertsArg::Fused {
        return Ok(Experts::Fused);
    }
    let what = "separate names depend on the family of the model: name its config.json with --config, or put it into the \
                directory SRC, or beside the file SRC";
    let unknown = || CliError::Option { option: "--experts", what: what.to_owned() };
    Ok(Experts::Separate(names.ok_or_else(unknown)?))
}

/// Number of tensors of each role that are not included.
fn left_out(checkpoint: &Checkpoint, conversion: &Conversion) -> [usize; 3] {
    let count = |counted_role: Role| {
        let roles = checkpoint.tensors.values().map(|tensor| tensor.role);
        roles.filter(|&role| role == counted_role && !is_in(role, conversion.part)).count()
    };
    [Role::Model, Role::Optimizer, Role::Other].map(count)
}

/// The results of a conversion.
struct Summary<'a> {
    args: &'a ConvertArgs,
    checkpoint: &'a Checkpoint,
    /// Number of model, optimizer and other tensors.
    left_out: [usize; 3],
    /// Other checkpoints next to the converted one.
    not_converted: Vec<String>,
    report: ConversionReport,
}

impl Summary<'_> {
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes_per_second(&self) -> f64 {
        self.report.data_bytes as f64 / self.report.elapsed.as_secs_f64().max(1e-9)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = [notes_of(self.checkpoint), self.report.notes.clone()].concat();
        if !self.not_converted.is_empty() {
            notes.push(format!("not converted: {}", listed(&self.not_converted)));
        }
        notes
    }

    fn left_out_text(&self) -> Option<String> {
        let [model, optimizer, other] = self.left_out;
        let named = [(model, "model tensor"), (optimizer, "optimizer tensor"), (other, "other tensor")];
        let nonzero: Vec<String> = named
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, noun)| counted(count, noun))
            .collect();
        (!nonzero.is_empty()).then(|| format!("{} (--only all takes everything)", nonzero.join(", ")))
    }
}

impl Report for Summary<'_> {
    fn json(&self) -> Json {
        let [model, optimizer, other] = self.left_out;
        let tied = |(copy, kept): &(String, String)| json!({"tensor": copy, "same_as": kept});
        json!({
            "source": json_path(&self.args.source),
            "source_format": self.checkpoint.format,
            "destination": json_path(&self.args.destination),
            "target": target_name(self.args.to),
            "tensors": self.report.tensors,
            "values": self.report.values,
            "bytes": self.report.data_bytes,
            "files": self.report.files,
            "checksums": self.report.checksums,
            "seconds": self.report.elapsed.as_secs_f64(),
            "bytes_per_second": self.bytes_per_second(),
            "left_out": {"model": model, "optimizer": optimizer, "other": other},
            "dropped_values": self.report.dropped_values,
            "tied": self.report.tied.iter().map(tied).collect::<Vec<_>>(),
            "opaque": opaque_json(self.checkpoint),
            "notes": self.notes(),
        })
    }

    fn write(&self, to: &mut dyn Document) {
        let ConversionReport { tensors, values, data_bytes, files, checksums, .. } = &self.report;
        to.pair("read", format!("{} ({})", self.args.source.display(), self.checkpoint.format));
        to.pair("wrote", format!("{}, {}", self.args.destination.display(), counted(*files, "file")));
        let values = if *values > 0 { format!(", {}", counted(*values, "value")) } else { String::new() };
        to.pair("tensors", format!("{tensors}, {}{values}", bytes(*data_bytes)));
        to.pair("checked", format!("{} of the source", counted(*checksums, "checksum")));
        let (seconds, rate) = (self.report.elapsed.as_secs_f64(), self.bytes_per_second() / 1e9);
        to.pair("time", format!("{seconds:.2} s, {rate:.2} GB/s"));
        self.left_out_text().iter().for_each(|left_out| to.pair("left out", left_out));
        let dropped = &self.report.dropped_values;
        if !dropped.is_empty() {
            let (count, target) = (counted(dropped.len(), "value"), target_name(self.args.to));
            to.pair("dropped", format!("{count} that {target} cannot hold: {}", listed(dropped)));
        }
        for (copy, kept) in &self.report.tied {
            to.pair("tied", format!("{copy} is {kept}, which is written once"));
        }
        to.each(Mark::Warning, "note:", self.notes());
    }
}
