//! Selects the tensors and values of the output, and decides their names and dtypes.

use std::collections::BTreeMap;

use super::{Conversion, ConversionReport, Layout, Part, Target, Tied, layout, names::Renaming};
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Object, Role, Tensor, Wrappers, join},
    error::Error,
    safetensors::TensorType,
    targets::{OutputTensor, Selection},
};

/// Number of example names in a message.
const EXAMPLES: usize = 3;

/// Selects, renames and types tensors and values.
pub(super) fn select(
    checkpoint: &Checkpoint,
    conversion: &Conversion,
    report: &mut ConversionReport,
) -> Result<Selection, Error> {
    let refused = |reason: String| Error::bad_request(&checkpoint.path, reason);
    let collide = |name: &str, first: &str, second: &str| {
        refused(format!("`{first}` and `{second}` would both be named `{name}`; change the renaming"))
    };
    check_request(checkpoint, conversion).map_err(refused)?;
    let mut renaming = Renaming::new(conversion.strip_prefix.as_deref(), &conversion.renames);
    let wrappers = conversion.strip_wrappers.then(|| checkpoint.wrapping());
    let mut tensors = BTreeMap::new();
    for (source, tensor) in
        checkpoint.tensors.iter().filter(|(_, tensor)| is_in(tensor.role, conversion.part))
    {
        let path = laid_out(conversion.layout, wrappers, tensor.role, &tensor.path);
        let output = output(source, tensor, renaming.path(&path), conversion.dtype);
        if output.name.is_empty() {
            let reason =
                format!("nothing is left of the name `{source}` after renaming; change the renaming");
            return Err(refused(reason));
        }
        if let Some(first) = tensors.insert(output.name.clone(), output) {
            return Err(collide(&first.name, &first.source, source));
        }
    }
    if tensors.is_empty() {
        return Err(refused(nothing_selected(checkpoint)));
    }
    let mut values: BTreeMap<String, (Object, String)> = BTreeMap::new();
    for (source, object) in values_laid_out(checkpoint, conversion, wrappers) {
        let path = renaming.path(&object.path);
        let (name, value) = (join(&path), renaming.value(&object.path, &object.value));
        let taken = tensors.get(&name).map(|tensor| tensor.source.clone());
        let object = Object { path, role: object.role, value };
        let taken = taken.or(values.insert(name.clone(), (object, source.clone())).map(|(_, first)| first));
        if let Some(first) = taken {
            return Err(collide(&name, &first, &source));
        }
    }
    check_used(&renaming, checkpoint, conversion).map_err(refused)?;
    values.retain(|name, (object, _)| {
        let is_opaque = object.value.opaque_class().is_some();
        report.dropped_values.extend(is_opaque.then(|| name.clone()));
        !is_opaque
    });
    let notes = &mut report.notes;
    note_types(&tensors, conversion, notes);
    note_wrappers(checkpoint, conversion, notes).map_err(refused)?;
    if conversion.target == Target::Safetensors {
        note_common_step(&tensors, notes);
    }
    let mut tensors: Vec<OutputTensor> = tensors.into_values().collect();
    tie(checkpoint, &mut tensors);
    Ok(Selection { tensors, values: values.into_values().map(|(object, _)| object).collect() })
}

/// Refuses requests that no checkpoint of this kind could satisfy.
fn check_request(checkpoint: &Checkpoint, conversion: &Conversion) -> Result<(), String> {
    if let Some(dtype) = conversion.dtype.filter(|dtype| !dtype.is_convertible()) {
        return Err(format!("tensors cannot be converted to {dtype}; choose F64, F32, BF16 or F16"));
    }
    if conversion.target == Target::Safetensors && conversion.tied == Some(Tied::Twice) {
        let reason = "safetensors hold tied weights once; omit --tied twice, or write another format";
        return Err(reason.to_owned());
    }
    let has_layout = conversion.layout.is_some() && is_in(Role::Optimizer, conversion.part);
    match layout::first_numbered(checkpoint).filter(|_| has_layout) {
        None => Ok(()),
        Some(name) => Err(format!(
            "its optimizer identifies parameters by number (`{name}`), but --layout needs names, which only \
             the model has: `fsdp train --resume-from` takes them from the model and saves them, so convert \
             what it saves; or omit --layout, or convert the model alone with --only model"
        )),
    }
}

/// Removes wrappers from a path, if requested, and moves it to its place in the layout.
fn laid_out(layout: Option<Layout>, wrappers: Option<Wrappers>, role: Role, path: &[Key]) -> Vec<Key> {
    let path = wrappers.map_or_else(|| path.to_vec(), |wrappers| wrappers.strip_any(role, path));
    layout.map_or_else(|| path.clone(), |layout| layout.path(role, &path))
}

/// Returns the selected values, placed as by [`laid_out`], each with the name of its source value.
fn values_laid_out(
    checkpoint: &Checkpoint,
    conversion: &Conversion,
    wrappers: Option<Wrappers>,
) -> Vec<(String, Object)> {
    let selected = checkpoint.values.iter().filter(|(_, object)| is_in(object.role, conversion.part));
    let stripped = selected.map(|(name, object)| {
        let path = laid_out(None, wrappers, object.role, &object.path);
        let value = wrappers.map(|wrappers| wrappers.strip_value(&object.path, &object.value));
        let value = value.unwrap_or_else(|| object.value.clone());
        (name.clone(), Object { path, role: object.role, value })
    });
    let stripped: Vec<(String, Object)> = stripped.collect();
    match conversion.layout {
        Some(layout) => layout.values(stripped),
        None => stripped,
    }
}

fn is_in(role: Role, part: Part) -> bool {
    match part {
        Part::Model => role == Role::Model,
        Part::Optimizer => role == Role::Optimizer,
        Part::All => true,
    }
}

fn output(source: &str, tensor: &Tensor, path: Vec<Key>, dtype: Option<TensorType>) -> OutputTensor {
    let is_converted = tensor.role == Role::Model && tensor.dtype.is_convertible();
    OutputTensor {
        name: join(&path),
        path,
        role: tensor.role,
        source: source.to_owned(),
        dtype: dtype.filter(|_| is_converted).unwrap_or(tensor.dtype),
        shape: tensor.shape.clone(),
        tied_to: None,
    }
}

fn nothing_selected(checkpoint: &Checkpoint) -> String {
    let count = |role| checkpoint.tensors.values().filter(|tensor| tensor.role == role).count();
    let (model, optimizer, other) = (count(Role::Model), count(Role::Optimizer), count(Role::Other));
    let held = format!("{model} model tensors, {optimizer} optimizer tensors, {other} others");
    format!("it holds nothing that was selected ({held})")
}

/// A prefix or renaming that changed nothing is reported as a mistake.
fn check_used(renaming: &Renaming, checkpoint: &Checkpoint, conversion: &Conversion) -> Result<(), String> {
    let selected = checkpoint.tensors.iter().filter(|(_, tensor)| is_in(tensor.role, conversion.part));
    let unused = |what: String| {
        let examples: Vec<String> = selected.map(|(name, _)| format!("`{name}`")).take(EXAMPLES).collect();
        Err(format!("no name {what}; names are, for example, {}", examples.join(", ")))
    };
    if let Some(prefix) = conversion.strip_prefix.as_ref().filter(|_| !renaming.used_prefix) {
        return unused(format!("begins with `{prefix}`"));
    }
    match conversion.renames.iter().zip(&renaming.used).find(|(_, used)| !**used) {
        Some((rename, _)) => unused(format!("matches `{}`", rename.pattern())),
        None => Ok(()),
    }
}

/// Notes the wrappers that stay in names. A request to remove wrappers that do not exist is reported as a mistake.
fn note_wrappers(
    checkpoint: &Checkpoint,
    conversion: &Conversion,
    notes: &mut Vec<String>,
) -> Result<(), String> {
    match (checkpoint.wrapper_note(), conversion.strip_wrappers) {
        (None, true) => Err("no name contains a wrapper to remove; omit --strip-wrappers".to_owned()),
        (Some(note), false) => {
            notes.push(note);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Notes the number of tensors that kept their dtypes although another one was requested.
fn note_types(tensors: &BTreeMap<String, OutputTensor>, conversion: &Conversion, notes: &mut Vec<String>) {
    let Some(dtype) = conversion.dtype else { return };
    let kept = tensors.values().filter(|tensor| tensor.dtype != dtype).count();
    if kept > 0 {
        notes.push(format!(
            "{kept} tensors kept their types: only floating-point tensors of the model become {dtype}"
        ));
    }
}

/// Notes a step with which all model names start because of how the model was saved.
fn note_common_step(tensors: &BTreeMap<String, OutputTensor>, notes: &mut Vec<String>) {
    let mut models = tensors.values().filter(|tensor| tensor.role == Role::Model);
    let first_step = |tensor: &OutputTensor| match tensor.path.as_slice() {
        [Key::Name(step), _, ..] => Some(step.clone()),
        _ => None,
    };
    let Some(step) = models.next().and_then(first_step) else { return };
    if models.all(|tensor| first_step(tensor).as_ref() == Some(&step)) {
        notes.push(format!("all names of the model begin with `{step}.`; --strip-prefix {step}. removes it"));
    }
}

/// Finds weights whose elements are the same bytes of the source.
///
/// Optimizer state is never tied: sources that store one step count for all parameters mean one for each, and an
/// optimizer that found them in one storage would advance all of them with each parameter.
fn tie(checkpoint: &Checkpoint, tensors: &mut [OutputTensor]) {
    let mut firsts: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
    for index in (0..tensors.len()).filter(|&index| tensors[index].role == Role::Model).collect::<Vec<_>>() {
        let chunks = |index: usize| -> &[Chunk] { &checkpoint.tensors[&tensors[index].source].chunks };
        let Some(first_chunk) = chunks(index).first().filter(|_| !tensors[index].is_empty()) else {
            continue;
        };
        let candidates = firsts.entry((first_chunk.source, first_chunk.offset)).or_default();
        let is_same = |&other: &usize| {
            let (a, b) = (&tensors[other], &tensors[index]);
            a.dtype == b.dtype && a.shape == b.shape && chunks(other) == chunks(index)
        };
        match candidates.iter().copied().find(is_same) {
            Some(first) => tensors[index].tied_to = Some(first),
            None => candidates.push(index),
        }
    }
}
