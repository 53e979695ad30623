//! `fsdp ckpt inspect`: describes a checkpoint from its metadata alone.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use fsdp_ckpt::checkpoint::{Checkpoint, Chunk, Region, Role, Tensor};
use serde_json::{Map, Value as Json, json};

use super::{LISTED_MAX, counted, json_path, line, notes_of, opaque_json, open, print, role_name, values};
use crate::args::InspectArgs;
use crate::error::CliError;
use crate::output::{Paint, one_line, table};
use crate::units::{bytes, grouped};

/// Prints a description of a checkpoint.
///
/// # Errors
/// [`CliError::Checkpoint`] if it cannot be opened.
pub(super) fn run(args: &InspectArgs) -> Result<(), CliError> {
    let checkpoint = open(&args.path, &args.reading)?;
    let report = Report::new(&checkpoint, args.tensors);
    print(args.json, || report.json(), || report.text(Paint::of(&io::stdout())))
}

/// Tensors of one role and type.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

/// The description of a checkpoint.
struct Report<'a> {
    checkpoint: &'a Checkpoint,
    groups: BTreeMap<(Role, &'static str), Group>,
    files: BTreeMap<&'a Path, u64>,
    problems: Vec<String>,
    lists_tensors: bool,
}

impl<'a> Report<'a> {
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

    fn text(&self, paint: Paint) -> String {
        let checkpoint = self.checkpoint;
        let mut text = String::new();
        line(&mut text, "path", &checkpoint.path.display().to_string());
        line(&mut text, "format", &checkpoint.format);
        if let Some(world_size) = checkpoint.world_size {
            line(&mut text, "world size", &world_size.to_string());
        }
        line(&mut text, "tensors", &format!("{}, {}", checkpoint.tensors.len(), bytes(self.bytes())));
        line(&mut text, "files", &format!("{}, {}", self.files.len(), bytes(self.files.values().sum())));
        for (key, value) in &checkpoint.run_state {
            line(&mut text, key, &values::short(value));
        }
        if !self.groups.is_empty() {
            let _ = write!(
                text,
                "\n{}",
                table(["role", "dtype", "tensors", "elements", "bytes"], self.group_rows())
            );
        }
        text += &self.values_text(paint);
        if self.lists_tensors {
            let header = ["tensor", "dtype", "shape", "role", "chunks"];
            let _ = write!(text, "\n{}", table(header, checkpoint.tensors.iter().map(tensor_row)));
        }
        for note in notes_of(checkpoint).into_iter().chain(checkpoint.wrapper_note()) {
            let _ = writeln!(text, "{} {}", paint.warning("note:"), one_line(&note));
        }
        for problem in self.problems.iter().take(LISTED_MAX) {
            let _ = writeln!(text, "{} {}", paint.bad("problem:"), one_line(problem));
        }
        if let Some(more @ 1..) = self.problems.len().checked_sub(LISTED_MAX) {
            let _ = writeln!(text, "{} {more} more (--json lists all)", paint.bad("problem:"));
        }
        text
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
    fn values_text(&self, paint: Paint) -> String {
        let all = &self.checkpoint.values;
        if all.is_empty() {
            return String::new();
        }
        // Run state is already shown elsewhere.
        let is_run_state = |name: &str| name == "run_state" && !self.checkpoint.run_state.is_empty();
        let shown: Vec<_> = all
            .iter()
            .filter(|(name, object)| object.role != Role::Optimizer && !is_run_state(name))
            .take(LISTED_MAX)
            .collect();
        let mut text = format!("\n{}", paint.heading(&counted(all.len(), "value")));
        let rest = all.len() - shown.len();
        if rest > 0 {
            let _ = write!(text, ", of which {rest} are not shown (--json lists all)");
        }
        text.push('\n');
        for (name, object) in shown {
            let _ = writeln!(text, "  {} = {}", one_line(name), one_line(&values::text(&object.value)));
        }
        text
    }

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
            "notes": notes_of(checkpoint).into_iter().chain(checkpoint.wrapper_note()).collect::<Vec<_>>(),
            "problems": self.problems,
        });
        if self.lists_tensors {
            json["tensors"] =
                checkpoint.tensors.iter().map(|tensor| tensor_json(checkpoint, tensor)).collect();
        }
        json
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
