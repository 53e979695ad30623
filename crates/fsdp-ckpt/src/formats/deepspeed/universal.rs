//! Universal checkpoints, as DeepSpeed's `ds_to_universal.py` writes them: whole parameters that any number of ranks can load.
//!
//! ```text
//! latest_universal                   beside the folder: its name
//! global_step10_universal/
//!   mp_rank_00_model_states.pt       a copy of the model file; in stage 3 those of all ranks
//!   zero/optimizer_state.pt          settings of the parameter groups
//!   zero/<parameter>/fp32.pt         the weight, in 32 bits
//!   zero/<parameter>/exp_avg.pt, ..  the states of the optimizer
//! ```
//!
//! A tensor is under the key `param` or, from stage 3, the whole file: a flat tensor whose shape is in the model file.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{
    KNOWN_KEYS, MODEL_FILES, add_others,
    merge::{add_frozen, add_shared},
    parse::{self, ModelStates},
};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Value, element_count},
    error::{Error, Fault},
    file_io::Files,
    formats::{
        local::LocalTensor,
        optimizer::{StateItem, groups, put_groups, put_tensor, put_value, state_path},
        rank_fault::no_rank_files,
        rank_file::RankFile,
        rank_names::{complete, sets_of},
    },
    torch::Item,
};

const FOLDER: &str = "zero";

const WEIGHT: &str = "fp32";

const STEP: &str = "step";

/// The damage that nothing in the files reveals.
const EXCHANGED: &str = "files of one state that were exchanged between parameters of the same shape: they do not state \
                         their parameter";

/// Settings that all parameters share.
const SETTINGS_FILE: &str = "optimizer_state.pt";

/// Whether a directory with these names is a universal checkpoint.
pub(super) fn is_at(dir: &Path, names: &[String]) -> bool {
    let (files, folder) = (Files::anywhere(), dir.join(FOLDER));
    let has_weight = |name: &String| files.exists(&folder.join(name).join(format!("{WEIGHT}.pt")));
    names.iter().any(|name| name == FOLDER)
        && files.list(&folder).is_ok_and(|parameters| parameters.iter().any(has_weight))
}

/// Reads the checkpoint in a directory with these names.
pub(super) fn open(path: &Path, dir: &Path, names: &[String]) -> Result<Checkpoint, Error> {
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "DeepSpeed universal checkpoint".to_owned(),
        ..Checkpoint::default()
    };
    let set = sets_of(names).into_iter().find(|(pattern, _)| pattern.ends_with(MODEL_FILES));
    let (_, set) = set.ok_or_else(|| no_rank_files("mp_rank_00_model_states.pt").in_file(dir))?;
    let models = RankFile::open_all(&complete(dir, set)?, &mut checkpoint)?;
    let mut states = models.iter().map(parse::model_states).collect::<Result<Vec<_>, _>>()?;
    let (folder, model) = (dir.join(FOLDER), states[0].clone());
    let mut parameters = Files::anywhere().list(&folder)?;
    parameters.sort();
    parameters.retain(|name| Files::anywhere().is_directory(&folder.join(name)));
    // The converter widens buffers; the model file has them as they are.
    parameters.retain(|name| !model.buffer_names.contains(name));
    let wanted = model.param_shapes.iter().flatten().map(|(name, _)| name);
    if let Some(missing) = wanted.into_iter().find(|name| !parameters.contains(name)) {
        let fault =
            Fault::unexpected(format!("the folder `{missing}`, a parameter of the model file,"), "here");
        return Err(fault.in_file(folder));
    }
    let mut states_of = BTreeMap::new();
    for name in &parameters {
        let states = add_parameter(&folder.join(name), name, &model, &mut checkpoint)?;
        states_of.insert(name, states);
    }
    check_states(&folder, &states_of)?;
    checkpoint.limits.push(EXCHANGED.to_owned());
    // In stage 3, the converter leaves frozen parameters to the model files.
    let is_here = |name: &String| checkpoint.tensors.contains_key(name);
    states.iter_mut().for_each(|state| state.frozen_shapes.retain(|(name, _)| !is_here(name)));
    add_frozen(&states, &mut checkpoint)?;
    add_shared(&model, &mut checkpoint);
    add_buffers(&model, &mut checkpoint)?;
    add_settings(&folder.join(SETTINGS_FILE), &model, &mut checkpoint)?;
    add_others(&models[0], &KNOWN_KEYS, &mut checkpoint)?;
    Ok(checkpoint)
}

/// Checks that each parameter has the states that others have, or none, if it never had a gradient.
fn check_states(folder: &Path, states_of: &BTreeMap<&String, Vec<String>>) -> Result<(), Error> {
    let all: BTreeSet<&String> = states_of.values().flatten().collect();
    let is_partial = |states: &Vec<String>| !states.is_empty() && states.len() < all.len();
    let Some((name, states)) = states_of.iter().find(|(_, states)| is_partial(states)) else { return Ok(()) };
    let missing = all.into_iter().find(|state| !states.contains(state)).map_or("", String::as_str);
    let fault = Fault::unexpected(format!("`{missing}.pt`, which other parameters have,"), "here");
    Err(fault.in_file(folder.join(name)))
}

/// Adds the weight and the states in the folder of a parameter; returns the names of the states.
fn add_parameter(
    folder: &Path,
    name: &str,
    model: &ModelStates,
    into: &mut Checkpoint,
) -> Result<Vec<String>, Error> {
    let mut files = Files::anywhere().list(folder)?;
    files.sort();
    if !files.iter().any(|file| file == "fp32.pt") {
        return Err(no_rank_files("fp32.pt").in_file(folder));
    }
    let shapes = model.param_shapes.iter().flatten().chain(&model.frozen_shapes);
    let shape = shapes.into_iter().find(|(known, _)| known == name).map(|(_, shape)| &shape[..]);
    let mut states = Vec::new();
    for file in files {
        let Some(state) = file.strip_suffix(".pt") else { continue };
        let file = RankFile::open(&folder.join(&file), into)?;
        // Files that are saved through a stream have this name.
        if ![state, "archive"].contains(&&file.folder[..]) {
            let saved = format!("the name it was saved under, {}.pt,", file.folder);
            return Err(file.unexpected(saved, "its own"));
        }
        if state != WEIGHT {
            states.push(state.to_owned());
        }
        let item = match &file.root {
            Item::Dict(_) => file.root.get("param").ok_or_else(|| file.unexpected("`param`", "here"))?,
            item => item,
        };
        let (path, role) = match state {
            WEIGHT => (vec![Key::Name(name.to_owned())], Role::Model),
            state => (state_path(name, state), Role::Optimizer),
        };
        match StateItem::of(item, file.source) {
            StateItem::Tensor(tensor) => {
                let tensor = if state == STEP { tensor } else { shaped(tensor, shape, &file)? };
                let put = put_tensor(into, tensor.to_tensor(path, role));
                put.map_err(|fault| fault.in_file(&file.path))?;
            }
            StateItem::Value(_) if state == WEIGHT => return Err(file.unexpected("its root", "a tensor")),
            StateItem::Value(value) => put_value(into, path, value),
        }
    }
    Ok(states)
}

/// A tensor in the shape of its parameter, if it is flat.
fn shaped(tensor: LocalTensor, shape: Option<&[u64]>, file: &RankFile) -> Result<LocalTensor, Error> {
    let Some(shape) = shape.filter(|shape| *shape != tensor.shape) else { return Ok(tensor) };
    if tensor.shape.len() != 1 || element_count(shape) != Some(tensor.len()) {
        let (expected, got) = (format!("of shape {shape:?}"), &tensor.shape);
        return Err(file.unexpected(format!("its tensor, of shape {got:?},"), &expected));
    }
    let flat = tensor.flat("its tensor").map_err(|fault| fault.in_file(&file.path))?;
    let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
    Ok(LocalTensor { shape: shape.to_vec(), strides, ..flat })
}

fn add_buffers(model: &ModelStates, into: &mut Checkpoint) -> Result<(), Error> {
    for name in &model.buffer_names {
        let Some(buffer) = model.module.get(name) else { continue };
        let put = put_tensor(into, buffer.to_tensor(vec![Key::Name(name.clone())], Role::Model));
        put.map_err(|fault| fault.in_file(&model.path))?;
    }
    Ok(())
}

/// Adds the settings of parameter groups and, from stage 3, whose parameters have no counts, those of their groups.
fn add_settings(path: &Path, model: &ModelStates, into: &mut Checkpoint) -> Result<(), Error> {
    let file = RankFile::open(path, into)?;
    let settings = file.root.get("param_groups").map(Item::to_value);
    let settings = settings.as_ref().and_then(groups).unwrap_or_default();
    let names = |group: usize| model.param_shapes.get(group).into_iter().flatten().map(|(name, _)| name);
    put_groups(into, &settings, |group, _| Value::List(names(group).cloned().map(Value::Str).collect()));
    let states = file.root.get("optimizer_state_dict").and_then(|optimizer| optimizer.get("state"));
    let Some(Item::Dict(states)) = states else { return Ok(()) };
    for (group, (_, state)) in states.iter().enumerate() {
        let Some(step) = state.get(STEP) else { continue };
        for name in names(group) {
            let path = state_path(name, STEP);
            match StateItem::of(step, file.source) {
                StateItem::Tensor(tensor) => put_tensor(into, tensor.to_tensor(path, Role::Optimizer))
                    .map_err(|fault| fault.in_file(&file.path))?,
                StateItem::Value(value) => put_value(into, path, value),
            }
        }
    }
    Ok(())
}
