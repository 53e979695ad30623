//! `fsdp ckpt inspect`: describes a checkpoint from its metadata alone.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fsdp_ckpt::checkpoint::{Checkpoint, Chunk, Object, Region, Role, Tensor};
use serde_json::{Map, Value as Json, json};

use super::shared::{LISTED_MAX, json_path, list_problems, notes_of, opaque_json, open, role_name};
use super::values;
use crate::args::InspectArgs;
use crate::document::{Document, Mark, Report, print};
use crate::error::CliError;
use crate::units::{bytes, counted, grouped};

/// Prints a description of a checkpoint.
///
/// # Errors
/// [`CliError::Checkpoint`] if it cannot be opened.
pub(super) fn run(args: &InspectArgs) -> Result<(), CliError> {
    let checkpoint = open(&args.path, &args.reading)?;
    print(&Inspection::new(&checkpoint, args.tensors), args.json)
}

/// Tensors of one role and type.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

/// The description of a checkpoint.
struct Inspection<'a> {
    checkpoint: &'a Checkpoint,
    groups: BTreeMap<(Role, &'static str), Group>,
    files: BTreeMap<&'a Path, u64>,
    problems: Vec<String>,
    lists_tensors: bool,
}

impl<'a> Inspection<'a> {
    fn new(checkpoint: &'a Checkpoint, lists_tensors: bool) -> Self {
        let mut groups: BTreeMap<(Role, &'static str), Group> = BTreeMap::new();
        let mut problems = Vec::new();
        for tensor in checkpoint.tensors.values() {
            let group = groups.entry((tensor.role, tensor.dtype.name())).or_default();
            group.tensors += 1;
            group.elements += tensor.len() * tensor.dtype.values() as u64;
            group.bytes += tensor.len_bytes();
            problems.extend(tensor.check_coverage(&checkpoint.sources).err().map(|error| error.to_string()));
        }
        let mut files = BTreeMap::new();
        for source in &checkpoint.sources {
            let path = source.path().as_path();
            // A file that has disappeared meanwhile counts as empty.
            files.entry(path).or_insert_with(|| fs::metadata(path).map_or(0, |metadata| metadata.len()));
        }
        Self { checkpoint, groups, files, problems, lists_tensors }
    }

    fn bytes(&self) -> u64 {
        self.groups.values().map(|group| group.bytes).sum()
    }

    fn group_rows(&self) -> Vec<[String; 5]> {
        let row = |(&(role, dtype), group): (&(Role, &'static str), &Group)| {
            let role = role_name(role).to_owned();
            let counts = [group.tensors as u64, group.elements].map(grouped);
            let [tensors, elements] = counts;
            [role, dtype.to_owned(), tensors, elements, bytes(group.bytes)]
        };
        self.groups.iter().map(row).collect()
    }

    /// Lists values other than optimizer settings, of which there are several per parameter.
    fn write_values(&self, to: &mut dyn Document) {
        let all = &self.checkpoint.values;
        if all.is_empty() {
            return;
        }
        // Run state is already shown elsewhere.
        let is_run_state = |name: &str| name == "run_state" && !self.checkpoint.run_state.is_empty();
        let is_shown =
            |(name, object): &(&String, &Object)| object.role != Role::Optimizer && !is_run_state(name);
        let shown: Vec<_> = all.iter().filter(is_shown).take(LISTED_MAX).collect();
        to.gap();
        let rest = match all.len() - shown.len() {
            0 => String::new(),
            rest => format!(", of which {rest} are not shown (--json lists all)"),
        };
        to.marked(Mark::Heading, &counted(all.len(), "value"), &rest);
        shown
            .into_iter()
            .for_each(|(name, object)| to.line(&format!("  {name} = {}", values::text(&object.value))));
    }

    /// Notes, also about names that module wrappers have changed.
    fn notes(&self) -> Vec<String> {
        notes_of(self.checkpoint).into_iter().chain(self.checkpoint.wrapper_note()).collect()
    }
}

impl Report for Inspection<'_> {
    fn json(&self) -> Json {
        let checkpoint = self.checkpoint;
        let group = |(&(role, dtype), group): (&(Role, &'static str), &Group)| {
            let Group { tensors, elements, bytes } = group;
            let role = role_name(role);
            json!({"role": role, "dtype": dtype, "tensors": tensors, "elements": elements, "bytes": bytes})
        };
        let run_state: Map<String, Json> =
            checkpoint.run_state.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let values: Map<String, Json> = checkpoint
            .values
            .iter()
            .map(|(name, object)| (name.clone(), values::json(&object.value)))
            .collect();
        let files: Vec<Json> =
            self.files.iter().map(|(path, bytes)| json!({"path": json_path(path), "bytes": bytes})).collect();
        let mut json = json!({
            "path": json_path(&checkpoint.path),
            "format": checkpoint.format,
            "world_size": checkpoint.world_size,
            "tensor_count": checkpoint.tensors.len(),
            "tensor_bytes": self.bytes(),
            "files": files,
            "groups": self.groups.iter().map(group).collect::<Vec<_>>(),
            "run_state": run_state,
            "values": values,
            "opaque": opaque_json(checkpoint),
            "notes": self.notes(),
            "problems": self.problems,
        });
        if self.lists_tensors {
            json["tensors"] =
                checkpoint.tensors.iter().map(|tensor| tensor_json(checkpoint, tensor)).collect();
        }
        json
    }

    fn write(&self, to: &mut dyn Document) {
        let checkpoint = self.checkpoint;
        to.pair("path", checkpoint.path.display());
        to.pair("format", &checkpoint.format);
        checkpoint.world_size.iter().for_each(|world_size| to.pair("world size", world_size));
        to.pair("tensors", format!("{}, {}", checkpoint.tensors.len(), bytes(self.bytes())));
        to.pair("files", format!("{}, {}", self.files.len(), bytes(self.files.values().sum())));
        checkpoint.run_state.iter().for_each(|(key, value)| to.pair(key, values::short(value)));
        to.table_of_any(["role", "dtype", "tensors", "elements", "bytes"], self.group_rows());
        self.write_values(to);
        if self.lists_tensors {
            to.gap();
            to.table(
                ["tensor", "dtype", "shape", "role", "chunks"],
                checkpoint.tensors.iter().map(tensor_row),
            );
        }
        to.each(Mark::Warning, "note:", self.notes());
        list_problems(to, &self.problems);
    }
}

fn tensor_row((name, tensor): (&String, &Tensor)) -> [String; 5] {
    let (dtype, role) = (tensor.dtype.name().to_owned(), role_name(tensor.role).to_owned());
    [
        name.clone(),
        dtype,
        format!("{:?}", tensor.dtype.value_shape(&tensor.shape)),
        role,
        tensor.chunks.len().to_string(),
    ]
}

fn tensor_json(checkpoint: &Checkpoint, (name, tensor): (&String, &Tensor)) -> Json {
    let chunk = |chunk: &Chunk| {
        let mut json = json!({
            "file": json_path(checkpoint.sources[chunk.source].path()),
            "offset": chunk.offset,
        });
        match &chunk.region {
            Region::Flat(elements) => json["elements"] = json!([elements.start, elements.end]),
            Region::Box { offsets, sizes, .. } => {
                json["offsets"] = json!(offsets);
                json["sizes"] = json!(sizes);
            }
        }
        json
    };
    json!({
        "name": name,
        "dtype": tensor.dtype.name(),
        "shape": tensor.dtype.value_shape(&tensor.shape),
        "role": role_name(tensor.role),
        "bytes": tensor.len_bytes(),
        "chunks": tensor.chunks.iter().map(chunk).collect::<Vec<_>>(),
    })
}
