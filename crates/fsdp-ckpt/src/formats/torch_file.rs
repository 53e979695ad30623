//! Single `torch.save` files: `.pth`, `.pt`, `.bin`.
//!
//! Nested state dicts are flattened as in distributed checkpoints. Tensors keep their strides and shared storages: two
//! tensors that view the same bytes have equal chunks. A root that is not a dict is named after the file. A file with
//! one rank's part of a distributed tensor is refused, since the other parts are not in it.

use std::path::Path;

use crate::{
    bytes::Section,
    checkpoint::{Checkpoint, Global, Key, Object, Role, Source, Value},
    error::{Error, Fault},
    file_io::PathFile,
    formats::{
        deepspeed, fields::text, rank_fault::part_of_ranks, trainer_folder::check_saved_name, tree::add_tree,
        xla,
    },
    native::{RUN_STATE, value_to_run_state},
    torch::{self, Item, TorchFile, add_opaque},
};

/// Reads a `torch.save` file.
///
/// # Errors
/// If the file cannot be read, is damaged, was not written by `torch.save`, or holds something unsupported.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let (file, len) = PathFile::open(path)?;
    let section = Section::new(&file, 0..len, path, "");
    let mut torch_file = torch::open(section)?;
    check_saved_name(path, &torch_file.folder).map_err(|fault| section.fault(fault))?;
    refuse_rank_file(&torch_file.root).map_err(|fault| section.fault(fault))?;
    if !matches!(torch_file.root, Item::Dict(_)) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        torch_file.root = Item::Dict(vec![(Value::Str(name), torch_file.root)]);
    }
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "PyTorch file (torch.save)".to_owned(),
        sources: vec![Source::File { path: path.to_owned(), len }],
        ..Checkpoint::default()
    };
    fill(&mut checkpoint, &mut torch_file).map_err(|fault| section.fault(fault))?;
    checkpoint.protections = torch_file.protections(0);
    checkpoint.assign_roles();
    Ok(checkpoint)
}

/// Reads the attributes of the one object in a `torch.save` file, whatever its class (`training_args.bin` of the Trainer).
/// The class is not looked up, and nothing of it is run: attributes are inert values, and a member of an enum is the value
/// that it was made of.
///
/// # Errors
/// If the file cannot be read, is damaged, or does not hold an object with attributes.
pub fn attributes(path: impl AsRef<Path>) -> Result<Vec<(String, Value)>, Error> {
    let path = path.as_ref();
    let (file, len) = PathFile::open(path)?;
    torch::attributes(Section::new(&file, 0..len, path, ""))
}

/// Refuses a file with one rank's shards, whose tensors look like those of a model. Distributed tensors, which state
/// that they are a part, are refused by name.
fn refuse_rank_file(root: &Item) -> Result<(), Fault> {
    if xla::holds_shards(root) {
        return Err(part_of_ranks("PyTorch/XLA FSDP"));
    }
    if deepspeed::is_rank_file(root) { Err(part_of_ranks("DeepSpeed")) } else { Ok(()) }
}

fn fill(checkpoint: &mut Checkpoint, file: &mut TorchFile) -> Result<(), Fault> {
    add_opaque(&file.root, &[], &mut checkpoint.opaque);
    checkpoint.notes.extend(file.note.map(str::to_owned));
    let run_state = take_run_state(&mut file.root);
    checkpoint.values.extend(run_state.map(|object| (RUN_STATE.to_owned(), object)));
    add_tree(&file.root, 0, Role::Other, part, checkpoint)
}

/// Removes the run state that came from a native checkpoint. It stays one value, as in other formats: flattening it would
/// drop its empty dicts and make it unrecognizable.
fn take_run_state(root: &mut Item) -> Option<Object> {
    let value = root.get(RUN_STATE).filter(|item| !item.holds_tensor())?.to_value();
    value_to_run_state(&value)?;
    if let Item::Dict(items) = root {
        items.retain(|(key, _)| text(key) != Some(RUN_STATE));
    }
    Some(Object { path: vec![Key::Name(RUN_STATE.to_owned())], role: Role::Other, value })
}

/// Whether a tensor of this name is a flat parameter of FSDP1.
pub(super) fn is_flat(name: &str) -> bool {
    name.split('.').next_back().is_some_and(|last| last.contains("_flat_param"))
}

/// The error for a distributed tensor in a single file.
pub(super) fn part(name: &str, class: &Global) -> Fault {
    if class.name == "ShardedTensor" && is_flat(name) {
        return Fault::unsupported(format!(
            "it is a local state of FSDP1 (`{name}`): flat parameters without the names and shapes of their \
             contents, which only the model's code has; save a sharded or full state dict instead"
        ));
    }
    let Global { module, name: class } = class;
    Fault::unsupported(format!(
        "tensor `{name}` is one rank's part of a {module}.{class}; name the directory that holds the files of all ranks"
    ))
}
